"""Studies: shared runs, resumption, failures, tables."""

import csv
import functools
import json
import re
import sys
from pathlib import Path

import pytest
import yaml

from ravan_flwr.cli import main
from ravan_flwr.config.presets import conf_folder
from ravan_flwr.config.run_config import read_config
from ravan_flwr.studies import spec
from ravan_flwr.studies.choosing import candidates, runs_of, table_runs
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.running import run_study
from ravan_flwr.studies.spec import read_study
from ravan_flwr.studies.tables import markdown, rows_as_csv
from ravan_flwr.training.machine import CORES, usable_cores
from tests.hand_made import SUMMARY
from tests.studies import chosen as choice_of

TABLES = [
    {"title": "One", "rows": {"base": {}, "more": {"heads": 8}}},
    {"title": "Two", "rows": {"same as base": {}}},
]
CONTENT = {
    "title": "A study",
    "num-clients": 3,
    "seeds": [0, 1],
    "settings": {"num-rounds": 1, "local-steps": 1, "classifier": "frozen"},
    "tables": TABLES,
}


def write(tmp_path, **changes):
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(CONTENT | changes))
    return path


@pytest.fixture
def forked_runs(python, monkeypatch):
    """Start a study's runs as forks."""
    monkeypatch.setattr(sys, "executable", python.executable)


# Several tests read the same studies, which take seconds, and none changes them.
study_of_conf = functools.cache(read_study)


@pytest.mark.parametrize("path", sorted((conf_folder() / "studies").glob("*.yaml")), ids=str)
def test_every_study_of_conf_can_be_read(path):
    study = study_of_conf(path)
    assert study.rows
    assert study.tables
    no_results = Results(Path("nowhere"))
    assert candidates(study, no_results) or table_runs(study, no_results)


def test_rows_with_equal_settings_share_their_runs(tmp_path):
    study = read_study(write(tmp_path))
    runs = table_runs(study, Results(tmp_path))
    assert len(runs) == 4
    assert len({run.name for run in runs}) == 4
    assert study.tables[0].rows["base"] == study.tables[1].rows["same as base"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"seed": 1},
            r"yaml: seed is unknown: did you mean 'seeds'\? Expected the fields \['choose",
        ),
        ({"choose": {"halving": 1}}, r"choose\.halving is unknown\. Expected .* \['extensions"),
        ({"tables": [{"title": "T", "row": {}}]}, r"tables\.0\.row is unknown.* 'rows'\? Expected"),
        ({"paper": {}}, "paper is unknown"),
        (
            {"seeds": 3},
            r"seeds: got 3: Input should be a valid list; expected what docs/reports\.md",
        ),
        ({"settings": {"method": "ravn"}}, "row 'base': method 'ravn' is unknown: did you mean"),
        (
            {"settings": {"method": "hetlora", "server-optimizer": "adam"}},
            "row 'base': server-optimizer = 'adam:0.01:0.9': got method 'hetlora', which does",
        ),
        (
            {"settings": {"method": "hetlora", "weighting": "median"}},
            "row 'base': weighting = 'median': got method 'hetlora', which does not compute",
        ),
        (
            {"settings": {"method": "full", "backbone-dtype": "4bit", "learning-rate": 1e-3}},
            "row 'base': backbone-dtype = '4bit': got method 'full', which changes pretrained",
        ),
        ({"seeds": []}, r"seeds: got \[\]: List should have at least 1 item"),
        ({"seeds": ["x"]}, r"seeds\.0: got 'x': Input should be a valid integer"),
        ({"choose": {"learning-rate": [1e-3], "seeds": []}}, "expected seeds for that in choose"),
        ({"settings": {"num-clients": "many"}}, "row 'base': num-clients = 'many': expected a"),
        ({"tables": 2 * TABLES[:1]}, "its title is another's, .* expected one of its own"),
        ({"choose": {"seeds": [1]}}, r"choose\.learning-rate is missing; expected the fields"),
        (
            {"choose": {"learning-rate": [-1], "seeds": [1]}},
            "choose.learning-rate: .* learning-rate = -1",
        ),
        ({"tables": [{"title": "T"}]}, r"tables\.0\.rows is missing; expected the fields"),
        (
            {"tables": [{"title": "T", "rows": {}, "equal-parameters": 1}]},
            r"tables\.0\.equal-parameters: got 1: Input should be a valid boolean",
        ),
    ],
)
def test_a_study_file_is_checked_before_any_run(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_study(write(tmp_path, **changes))


def test_a_preset_and_a_list_are_no_study(tmp_path):
    path = tmp_path / "x.yaml"
    for text, message in (
        ("task: vision", f"got a preset, expected a study; simulate preset={path} runs it"),
        ("[]", f"study {path} is no mapping, expected one with ['choose', 'num-clients',"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            read_study(path)


def test_a_study_runs_resumes_and_writes_its_tables(tmp_path, monkeypatch, capsys, forked_runs):
    path, folder = write(tmp_path), tmp_path / "out"
    main(["study", str(path), "--output", str(folder), "--jobs", "2"])
    summaries = sorted(folder.glob("runs/*/*/summary.json"))
    assert len(summaries) == 4
    text = (folder / "results.md").read_text()
    assert "| base |" in text.replace("**", "")
    rows = (folder / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    finals = [json.loads(p.read_text())["metrics"]["final"]["accuracy"] for p in summaries]
    assert all(str(final) in "".join(rows) for final in finals)
    assert {path.name for path in folder.glob("*.png")} == {
        "one-accuracy-by-bytes.png", "one-accuracy-by-seconds.png",
        "two-accuracy-by-bytes.png", "two-accuracy-by-seconds.png",
    }  # fmt: skip
    assert "(one-accuracy-by-bytes.png)" in text

    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    main(["study", str(path), "--output", str(folder)])  # all runs are done
    assert (folder / "results.md").read_text() == text
    assert "4 runs, 4 of them done" in capsys.readouterr().out


@pytest.mark.slow
def test_a_table_draws_spectra_of_runs_with_other_numbers_of_clients(tmp_path, forked_runs):
    rows = {"alone": {"num-clients": 1, "method": "full", "learning-rate": 1e-3}, "three": {}}
    tables = [{"title": "T", "rows": rows, "spectra": True}]
    path, folder = write(tmp_path, tables=tables, seeds=[0]), tmp_path / "out"
    assert run_study(path, folder, jobs=2)
    clients = {
        json.loads(p.read_text())["num-clients"] for p in folder.glob("runs/*/*/summary.json")
    }
    assert clients == {1, 3}
    assert {path.name for path in folder.glob("*.png")} == {
        "t-accuracy-by-bytes.png", "t-accuracy-by-seconds.png",
        "t-spectrum.png", "t-effective-rank.png",
    }  # fmt: skip
    with (folder / "t-spectrum.csv").open() as file:
        assert {row["group"] for row in csv.DictReader(file)} == {"alone", "three"}


def test_a_run_is_repeated_if_its_preset_changed(tmp_path):
    study = read_study(write(tmp_path))
    run, folder = table_runs(study, Results(tmp_path))[0], tmp_path / "out"
    directory = run.folder(folder) / "x"
    directory.mkdir(parents=True)
    (directory / "summary.json").write_text("{}")
    config = read_config(dict(run.settings)).as_dict()
    for change, done in (({"rank": 13}, True), ({"learning-rate": 0.5}, False)):
        (directory / "config.json").write_text(json.dumps(config | change))
        assert (run.directory(folder) is not None) == done


METHODS = {"ravan": {}, "fedit": {"method": "fedit"}, "full": {"method": "full"}}


def test_equal_parameters_requires_methods_of_similar_size(tmp_path):
    table = {"title": "T", "equal-parameters": True, "rows": METHODS}
    message = r"parameters differ by 98.2 % \(fedit 6,144, full 301,536, ravan 5,440\)"
    with pytest.raises(ValueError, match=message):
        read_study(write(tmp_path, tables=[table]))
    table["references"] = ["full"]
    with pytest.raises(ValueError, match="differ by 11.5 %"):
        read_study(write(tmp_path, tables=[table]))
    for references, message in (
        (["ful"], r"references \['ful'\] are no rows"),
        (["full", "ravan"], r"has rows \['fedit'\], expected at least two"),
    ):
        table["references"] = references
        with pytest.raises(ValueError, match=message):
            read_study(write(tmp_path, tables=[table]))
    table["references"] = ["full"]
    table["settings"] = {"lora-rank": 7}
    assert read_study(write(tmp_path, tables=[table])).tables[0].rows


@pytest.mark.slow
def test_a_learning_rate_is_chosen_on_the_validation_split(tmp_path, forked_runs):
    rates = {"learning-rate": [1e-5, 1e-2, 5.0], "seeds": [7]}
    rows = {"chosen": {}, "given": {"learning-rate": 1e-5}}
    settings = {"num-rounds": 2, "local-steps": 5, "classifier": "frozen"}
    tables = [{"title": "T", "rows": rows}]
    path = write(tmp_path, choose=rates, tables=tables, settings=settings, seeds=[0])
    study, folder = read_study(path), tmp_path / "out"
    no_results = Results(folder)
    for candidate in candidates(study, no_results):
        config = dict(candidate.settings)
        assert (config["evaluate-on"], config["validation-share"], config["seed"]) == (
            "clients", 0.2, 7,
        )  # fmt: skip
    assert len(candidates(study, no_results)) == 3
    assert runs_of(study.tables[0].rows["chosen"], no_results) == []  # no rate is chosen yet
    assert run_study(path, folder, jobs=2)
    chosen = study.tables[0].rows["chosen"]
    results = Results(folder)
    assert choice_of(chosen, results).rate == 1e-2
    (final,) = runs_of(chosen, results)
    assert "evaluate-on" not in dict(final.settings)
    text = markdown(study, results)
    assert "| 0.01 |" in text
    assert "| 1e-05 |" in text
    assert "(edge)" not in text


def test_a_file_that_is_no_yaml_is_an_error(tmp_path):
    (tmp_path / "x.yaml").write_text("a: [")
    with pytest.raises(ValueError, match="expected YAML; correct the file"):
        read_study(tmp_path / "x.yaml")


def test_killed_runs_without_output_are_listed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["sh", "-c", "kill -9 $$"])
    assert not run_study(write(tmp_path), tmp_path / "out", jobs=2)
    assert caplog.text.count("failed: ") == 4
    assert "it ended with status -9 and said nothing" in caplog.text
    listed = (tmp_path / "out" / "results.md").read_text().partition("## Failed")[2]
    assert listed.count("seed=1") == 2


CORES_EACH = max(1, usable_cores({}) // 2)


@pytest.mark.parametrize(
    ("jobs", "variables", "expected"),
    [
        (2, {}, f"- - {CORES_EACH}"),  # a run derives its threads from its cores
        (1, {}, "- - -"),
        (2, {"OMP_NUM_THREADS": "7"}, f"7 - {CORES_EACH}"),
        (2, {"MKL_NUM_THREADS": "5"}, f"- 5 {CORES_EACH}"),
    ],
)
def test_a_study_keeps_the_users_number_of_threads(
    tmp_path, monkeypatch, caplog, jobs, variables, expected
):
    """Runs at the same time have together no more processes than there are cores."""
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", CORES):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = "echo threads ${OMP_NUM_THREADS:--} ${MKL_NUM_THREADS:--} ${RAVAN_FLWR_CORES:--} >&2"
    command += "; false"
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["sh", "-c", command])
    assert not run_study(write(tmp_path), tmp_path / "out", jobs=jobs)
    assert caplog.text.count(f": threads {expected}\n") >= 4


def test_an_interrupted_study_starts_no_further_run(tmp_path, monkeypatch):
    started = []

    def command(run, *_):
        started.append(run)
        return ["sleep", "0.3"]

    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(spec.PlannedRun, "command", command)
    monkeypatch.setattr("ravan_flwr.studies.running.minutes", interrupt)
    with pytest.raises(KeyboardInterrupt):
        run_study(write(tmp_path), tmp_path / "out", jobs=1)
    assert len(started) <= 2  # the finished run, and one that started meanwhile


@pytest.mark.slow
def test_a_failed_run_is_listed_and_the_others_continue(tmp_path, caplog, forked_runs):
    tables = [{"title": "T", "rows": {"good": {}, "bad": {"limits": "max-update-norm=1e-9"}}}]
    path = write(tmp_path, tables=tables, seeds=[0])
    assert not run_study(path, tmp_path / "out", jobs=1)
    assert "failed" in caplog.text
    assert "round 1: got no valid reply" in caplog.text
    results = Results(tmp_path / "out")
    assert "| **" in markdown(read_study(path), results)
    assert "bad" not in markdown(read_study(path), results)


def test_mistakes_on_the_command_line_are_errors(tmp_path, capsys):
    for words in (["study", str(tmp_path / "x.yaml")], ["study", __file__, "--jobs", "0"]):
        with pytest.raises(SystemExit) as end:
            main(words)
        assert end.value.code == 2
    errors = capsys.readouterr().err
    found = f"found no file {Path(tmp_path / 'x.yaml')}; expected one as in conf/studies/"
    assert found in errors
    assert "--jobs 0: expected a whole number at least 1" in errors


# The paper's numbers, and its studies.


def with_paper(tmp_path, numbers, **changes):
    rows: dict[str, dict[str, str]] = {"ravan": {}, "fedit": {"method": "fedit"}}
    content = {
        "title": "t", "num-clients": 2, "seeds": [0], "settings": {},
        "tables": [{"title": "A", "paper": numbers, "rows": rows}],
    }  # fmt: skip
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content | changes))
    return path


def test_tables_show_the_papers_numbers(tmp_path):
    path = with_paper(tmp_path, {"ravan": 84.42})
    study = read_study(path)
    for run in table_runs(study, Results(tmp_path)):
        accuracy = 0.25 if ("method", "fedit") in run.settings else 0.5
        folder = run.folder(tmp_path) / "run"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(run.resolved))
        final = {"accuracy": accuracy, "f1": 0.9}
        summary = SUMMARY | {"metrics": {"final": final, "best": final}}
        (folder / "summary.json").write_text(json.dumps(summary))
    text = markdown(study, Results(tmp_path)).splitlines()
    assert text[4].startswith("|  | accuracy, % | paper, % | by seed |")
    assert any(line.startswith("| ravan | **50.0** | 84.4 | 50.0 |") for line in text)
    assert any(line.startswith("| fedit | 25.0 | - | 25.0 |") for line in text)
    rows = list(csv.DictReader(rows_as_csv(study, Results(tmp_path)).splitlines()))
    assert {row["row"]: row["paper"] for row in rows} == {"ravan": "84.42", "fedit": ""}
    # Another metric than the task's.
    tables = [{"title": "A", "rows": {"ravan": {}}, "metric": "f1"}]
    other = read_study(with_paper(tmp_path, {}, tables=tables))
    assert "| ravan | **90.0** |" in markdown(other, Results(tmp_path))
    # A reference row is not marked as the best.
    two_rows = {"ravan": {}, "fedit": {"method": "fedit"}}
    with_reference = [{"title": "A", "rows": two_rows, "references": ["ravan"]}]
    last = markdown(read_study(with_paper(tmp_path, {}, tables=with_reference)), Results(tmp_path))
    assert "| ravan | 50.0 |" in last
    assert "| fedit | **25.0** |" in last


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ({"x": 1.0}, r"paper \['x'\] are no rows, expected some of"),
        ({"ravan": "x"}, "tables.0.paper.ravan: got 'x': Input should be a valid number"),
    ],
)
def test_paper_numbers_that_fit_no_row_are_errors(numbers, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        read_study(with_paper(tmp_path, numbers))


# study -> number of tables, number of runs, (table, row, value) from the paper
PAPER = {
    "vision": (16, 264, ("SVHN, 50 clients, non-IID, higher budget", "ffa-lora", 84.24)),
    "language": (16, 264, ("MRQA, 20 clients, IID, lower budget", "fed-sb", 59.93)),
    "initialisation": (4, 48, ("20 Newsgroups", "gram-schmidt", 64.83)),
    "scales": (8, 48, ("20 Newsgroups, 50 clients", "trained", 65.67)),
    "glue": (24, 300, ("RTE, 50 clients, higher budget", "fedex-lora", 58.12)),
    "heads": (4, 60, None),
    "heterogeneity": (24, 360, None),
    "spectra": (2, 18, None),
}


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_studies_are_complete(name, tmp_path):
    tables, runs, number = PAPER[name]
    study = study_of_conf(conf_folder() / "studies" / f"{name}.yaml")
    assert len(study.tables) == tables
    assert len(table_runs(study, Results(tmp_path))) == runs
    assert all(table.paper.keys() == table.rows.keys() for table in study.tables) == bool(number)
    if number:
        title, row, value = number
        (table,) = [table for table in study.tables if table.title == title]
        assert table.paper[row] == value
