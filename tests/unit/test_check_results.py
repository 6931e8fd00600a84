"""scripts/check_results.py recomputes the tables independently of the studies, and finds errors."""

import json
import shutil

import numpy as np
import pytest
import yaml
from scipy import stats

from ravan_flwr.lab.results import Results
from ravan_flwr.lab.spec import read_study
from ravan_flwr.lab.tables import Page
from scripts import check_results
from tests.studies import fill
from tests.support import ROOT


def test_the_first_pages_exist():
    assert all((ROOT / name).is_file() for name in check_results.FIRST)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A copy of one page and of its records."""
    folder = tmp_path / "benchmarks" / "results"
    shutil.copytree(ROOT / "benchmarks" / "results" / "digits", folder / "digits")
    shutil.copy(ROOT / "benchmarks" / "results" / "digits.md", folder)
    (tmp_path / "conf").symlink_to(ROOT / "conf")
    monkeypatch.setattr(check_results, "ROOT", tmp_path)
    return folder


@pytest.mark.slow
def test_a_wrong_number_is_reported(folder, capsys):
    page = folder / "digits.md"
    with pytest.raises(SystemExit) as end:
        check_results.main()
    assert end.value.code == 0
    text = page.read_text()
    for right, wrong, says in (
        ("| -0.7 ± 1.3 | 0.003 |", "| -0.7 ± 1.2 | 0.003 |", "-0.7 ± 1.2"),
        ("| 74.4 ± 5.4 |", "| 74.5 ± 5.4 |", "74.5 ± 5.4"),
        ("| 10,400 | 1.24 MB |", "| 10,400 | 1.25 MB |", "1.25 MB"),
        ("| 0.001 0.01 0.03 | 15 |", "| 0.001 0.01 0.03 | 18 |", "18"),
    ):
        page.write_text(text.replace(right, wrong, 1))
        assert page.read_text() != text
        (line,) = check_results.wrong(page)
        assert line.startswith("digits.md: ")
        place = wrong.split(" ").index(says.split(" ", 1)[0])
        assert f"says {says}, records say {right.split(' ')[place]}" in line
    record = folder / "digits" / "starts-digits.jsonl"
    record.write_text(record.read_text().replace('"bytes-up": 1244280', '"bytes-up": 2244280'))
    page.write_text(text)
    assert len([*check_results.wrong(page)]) >= 1


@pytest.mark.slow
def test_numbers_of_first_pages_are_in_a_table_or_a_difference_of_rows(folder, capsys):
    text = (folder / "digits.md").read_text()
    lines = (folder / "digits" / "methods-digits.jsonl").read_text().splitlines()
    ends, rates = {}, {"fedit": "0.003", "ffa-lora": "0.01"}
    of_table = tuple(f"client:0.3 method={x} learning-rate={rate}" for x, rate in rates.items())
    for run in map(json.loads, lines):
        first, _, seed = run["settings"].rpartition(" seed=")
        if first.endswith(of_table):
            ends[first.split()[-2], seed] = run["final"]["accuracy"]
    seeds = [seed for method, seed in ends if method == "method=fedit"]
    differences = [ends["method=fedit", seed] - ends["method=ffa-lora", seed] for seed in seeds]
    middle = np.mean(differences)
    reach = stats.sem(differences) * stats.t.ppf(0.975, len(differences) - 1)
    sentence = f"FedIT is {abs(100 * middle):.1f} ± {100 * reach:.1f} away, and 74.4 ± 5.4"
    assert len(seeds) == 5
    assert "74.4 ± 5.4" in text
    for says, ends_with in ((sentence, 0), (sentence + ", or 9.9 ± 9.8", 1)):
        (folder.parents[1] / "README.md").write_text(says)
        with pytest.raises(SystemExit) as end:
            check_results.main()
        assert end.value.code == ends_with
    assert "README.md: says 9.9 ± 9.8, which no table says or implies" in capsys.readouterr().out


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("seed", range(3))
def test_both_implementations_agree_on_random_results(tmp_path, monkeypatch, seed):
    """Leave-one-seed-out, means of evaluations, Holm's correction, by independent code."""
    random = np.random.default_rng(seed)
    rows = {name: {"method": name} for name in ("ravan", "fedit", "ffa-lora", "hetlora")}
    own = {"title": "Own", "rows": rows, "leave-one-seed-out": True, "mean-of-last": 2}
    own["contrasts"] = ["fedit", "ffa-lora", "hetlora"]
    tables = [own, {"title": "Two", "rows": rows, "settings": {"heads": 2}, "run-as-good": True}]
    tables.append({"title": "Iid", "rows": rows, "settings": {"partition": "iid"}})
    tables[-1] |= {"rates-of": "Two", "change-from": "Two", "compare-last": 2}
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2, 3], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101, 102]},
        "tables": tables,
    }  # fmt: skip
    for folder in ("conf/studies", "docs"):
        (tmp_path / folder).mkdir(parents=True)
    file, page = tmp_path / "conf/studies/mine.yaml", tmp_path / "docs/page.md"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    titles = ["Own", "rates of Own", "Two", "rates of Two", "Iid", "overview"]
    marks = [f"<!-- study mine: {title} -->\n<!-- end of study -->\n" for title in titles]
    page.write_text("".join(marks))
    place = Page.of(page, file, read_study(file))
    results = Results(tmp_path, place.record)
    fill(place.study, results, lambda _: round(float(random.uniform(0.4, 0.6)), 6))
    page.write_text(place.with_tables(page.read_text(), results))
    monkeypatch.setattr(check_results, "ROOT", tmp_path)
    assert [*check_results.wrong(page)] == []
    assert "×" in page.read_text()


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.5, -0.25, 1.0, 0.75], stats.ttest_1samp([0.5, -0.25, 1.0, 0.75], 0).pvalue),
        ([0.0, 0.0, 0.0], 1.0),
        ([0.5, 0.5, 0.5], 0.0),
    ],
)
def test_the_paired_test_with_equal_differences_too(differences, expected):
    assert check_results.p_value(differences) == pytest.approx(expected, abs=1e-6)


def test_a_planned_study_is_accepted_and_one_that_hides_its_runs_is_not(tmp_path, monkeypatch):
    untrained = {"method": "none", "num-rounds": 1, "learning-rate": 1e-3}
    rows = {"ravan": {}, "fedit": {"method": "fedit"}, "none": untrained}
    table = {"title": "Own", "rows": rows, "references": ["none"]}
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101], "extensions": 1},
        "tables": [table | {"contrasts": ["fedit"]}],
    }  # fmt: skip
    (tmp_path / "conf/studies").mkdir(parents=True)
    (tmp_path / "page").mkdir()
    file, page = tmp_path / "conf/studies/mine.yaml", tmp_path / "page.md"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    page.write_text(
        "".join(
            f"<!-- study mine: {x} -->\n<!-- end of study -->\n" for x in ("Own", "rates of Own")
        )
    )
    place = Page.of(page, file, read_study(file))
    place.record.touch()
    monkeypatch.setattr(check_results, "ROOT", tmp_path)
    planned = place.with_tables(page.read_text(), Results(tmp_path, place.record))
    page.write_text(planned)
    assert [*check_results.wrong(page)] == []
    results, random = Results(tmp_path, place.record), np.random.default_rng(0)
    fill(place.study, results, lambda _: round(float(random.uniform(0.4, 0.6)), 6))
    (own, rates) = check_results.wrong(page)
    assert own.startswith("page.md: Own: has no table, and ")
    assert rates.startswith("page.md: rates of Own: has no table, and ")
    page.write_text(place.with_tables(planned, results))
    assert [*check_results.wrong(page)] == []
