"""The page of a study agrees with its record, as does every page of the documentation."""

import re

import pytest
from scipy import stats

from ravan_flwr.cli import main
from ravan_flwr.lab import spec
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.spec import read_study
from ravan_flwr.lab.tables import Page
from tests.commands import error_of
from tests.studies import fill
from tests.support import ROOT
from tests.unit.lab.written import written

ROWS = {"ravan": {}, "fedit": {"method": "fedit"}}
CHOOSE = {"learning-rate": [1e-3, 1e-2], "seeds": [100, 101, 102], "extensions": 0}
TABLES = [
    {"title": "One", "rows": ROWS},
    {"title": "Two, and more", "rows": {"alone": {"heads": 2}}},
]
BEGIN, END = "<!-- study mine: One -->", "<!-- end of study -->"


def study_of(tmp_path, *tables):
    return written(tmp_path, choose=CHOOSE, tables=[*tables]).rename(tmp_path / "mine.yaml")


@pytest.fixture
def study(tmp_path):
    return study_of(tmp_path, *TABLES)


def page_of(tmp_path, *lines):
    path = tmp_path / "results.md"
    path.write_text("\n".join(lines))
    return path


@pytest.mark.slow
def test_a_study_writes_its_page_and_the_numbers_beside_it(tmp_path, study, monkeypatch, capsys):
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    path = page_of(
        tmp_path, "# Mine", BEGIN, "what was here before", END, "between",
        "<!-- study mine: Two, and more -->", END, "<!-- study other: X -->", "kept", END,
        "<!-- study mine: rates of Two, and more -->", END, "",
    )  # fmt: skip
    place = Page.of(path, study, read_study(study))
    results = Results(tmp_path / "out", place.record)
    fill(place.study, results, lambda s: 0.5 + s["seed"] / 100 + (s.get("method") is None) / 10)
    words = ["study", str(study), "--output", str(tmp_path / "out"), "--page", str(path)]
    main([*words, "--tables-only"])
    text = path.read_text()
    assert "what was here before" not in text
    assert "0 runs of 27 are not done; nothing is run" in capsys.readouterr().out
    assert f"{BEGIN}\n\n|  | accuracy, % | to ravan |" in text
    below = f"{END}\nbetween\n<!-- study mine: Two, and more -->\n"
    assert f"Significantly worse than ravan: fedit.\n\n{below}" in text
    assert f"<!-- study other: X -->\nkept\n{END}\n" in text
    assert "|  | 0.001 | 0.01 | runs |" in text.partition("rates of Two, and more")[2]
    assert {file.name for file in (tmp_path / "results").iterdir()} >= {
        "mine.jsonl", "mine.csv", "mine-rates.csv", "mine-one-accuracy.png",
        "mine-one-accuracy-by-bytes.png", "mine-one-accuracy-by-seconds.png",
    }  # fmt: skip
    main(words)  # all runs are done: the page is the same
    assert path.read_text() == text


def test_an_overview_shows_every_row_of_every_table_with_its_change(tmp_path):
    study = study_of(
        tmp_path,
        {"title": "Before", "rows": ROWS},
        {"title": "After", "rows": ROWS, "change-from": "Before", "settings": {"heads": 2}},
        {"title": "Beside", "rows": {"alone": {"heads": 3}}},
    )
    path = page_of(tmp_path, "<!-- study mine: overview -->", END)
    place = Page.of(path, study, read_study(study))
    results = Results(tmp_path / "out", place.record)
    # By seed 0, 1, 2: ravan is 1, 2 and 3 points worse afterwards, for any effect of its seeds.
    seed_effect = {0: 0.9, 1: 0.5, 2: 0.7}

    def value_of(settings):
        worse = settings.get("heads") == 2 and "method" not in settings
        return seed_effect.get(settings["seed"], 0.5) - worse * (settings["seed"] + 1) / 100

    fill(place.study, results, value_of)
    place.write(results)
    ravan, fedit, alone = path.read_text().splitlines()[4:7]
    low, high = stats.t.interval(0.95, 2, -2, stats.sem([1, 2, 3]))
    assert f"; -2.0 ± {(high - low) / 2:.1f} |" in ravan
    assert ravan.endswith("| - |")
    assert "; 0.0 ± 0.0 |" in fedit
    assert re.fullmatch(r"\| alone \| - \| - \| \*\*70\.0 ± [0-9.]+\*\* \|", alone)
    assert (tmp_path / "results" / "mine-overview-accuracy.png").is_file()


def test_missing_runs_are_counted_and_not_run(tmp_path, study, capsys):
    main(["study", str(study), "--output", str(tmp_path / "out"), "--tables-only"])
    assert "18 runs of 18 are not done; nothing is run" in capsys.readouterr().out
    assert (tmp_path / "out" / "results.md").is_file()


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["# Mine"], "found 0 places for study mine, .* such as '<!-- study mine: T"),
        ([BEGIN], "found 1 places .*'<!-- end of study -->'"),
        ([BEGIN, BEGIN, END], r"found 2 places for study mine, with tables \['One'\]"),
        ([BEGIN, "<!-- study other: X -->", "kept", END], r"found 1 places .*, with tables \[\]"),
        (["<!-- study mine: Three -->", END], r"with tables \['Three'\] .*with tables of .*'One'"),
    ],
)
def test_a_page_without_marks_is_refused_before_any_run(tmp_path, study, lines, message):
    with pytest.raises(ValueError, match=message):
        Page.of(page_of(tmp_path, *lines), study, read_study(study))


def test_a_page_edited_meanwhile_is_checked_again_before_it_is_written(tmp_path, study):
    place = Page.of(page_of(tmp_path, BEGIN, END), study, read_study(study))
    path = page_of(tmp_path, BEGIN, END, "<!-- study mine: gone -->", END)
    before = path.read_text()
    with pytest.raises(ValueError, match="with tables .*'gone'"):
        place.write(Results(tmp_path / "out", place.record))
    assert path.read_text() == before
    assert not (tmp_path / "results" / "mine.csv").exists()


def test_a_page_that_is_missing_or_no_text_is_refused(tmp_path, study, capsys):
    (tmp_path / "results.md").write_bytes(b"\xff\xfe")
    for name in ("results.md", "no.md"):
        error = error_of(capsys, "study", study, "--page", tmp_path / name)
        assert "expected a page in Markdown" in error
    assert not (tmp_path / "studies").exists()


PAGES = sorted((ROOT / "benchmarks" / "results").glob("*.md"))
SHOWN = sorted(
    {
        (str(page.relative_to(ROOT)), name)
        for page in PAGES
        for name in re.findall(r"^<!-- study ([^:]+): ", page.read_text(), re.MULTILINE)
    }
)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("page", "name"), SHOWN)
def test_pages_of_the_documentation_equal_their_records(page, name):
    file = ROOT / "conf" / "studies" / f"{name}.yaml"
    place = Page.of(ROOT / page, file, read_study(file))
    results = Results(ROOT / "nowhere", place.record)
    text = place.path.read_text()
    again = f"write it again: ravan-flwr study {file} --page {page} --tables-only"
    assert place.with_tables(text, results) == text, again
    for suffix, numbers in place.numbers(results).items():
        written = (place.folder / f"{name}{suffix}.csv").read_text().splitlines()
        assert written == numbers.splitlines(), again
