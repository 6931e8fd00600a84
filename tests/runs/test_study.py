"""Studies: shared runs, resumption, failures, tables."""

import csv
import functools
import json
import re
import sys
from pathlib import Path

import pytest

from ravan_flwr.cli import main
from ravan_flwr.config.presets import conf_folder
from ravan_flwr.lab import spec
from ravan_flwr.lab.choosing import candidates, list_runs, table_runs
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.running import run_study
from ravan_flwr.lab.spec import read_study
from ravan_flwr.lab.tables import markdown, rows_as_csv
from ravan_flwr.training.machine import CORES, usable_cores
from tests.commands import error_of
from tests.hand_made import SUMMARY
from tests.studies import chosen as choice_of
from tests.unit.lab import written

SETTINGS = {"num-rounds": 1, "local-steps": 1, "classifier": "frozen"}
TABLES = [
    {"title": "One", "rows": {"base": {}, "more": {"heads": 8}}},
    {"title": "Two", "rows": {"same as base": {}}},
]


def write(tmp_path, *tables, seeds=(0, 1), settings=SETTINGS, **fields):
    fields |= {"settings": settings, "tables": [*tables] or TABLES}
    return written.written(tmp_path, seeds=[*seeds], **fields)


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


def test_a_study_runs_resumes_and_writes_its_tables(tmp_path, monkeypatch, capsys, forked_runs):
    path, folder = write(tmp_path), tmp_path / "out"
    main(["study", str(path), "--output", str(folder), "--jobs", "2"])
    summaries = sorted(folder.glob("runs/*/*/summary.json"))
    assert len(summaries) == 4
    text = (folder / "results.md").read_text()
    assert "| base |" in text.replace("**", "")
    rows = (folder / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 3
    for path_of_one in summaries:
        final = json.loads(path_of_one.read_text())["metrics"]["final"]["accuracy"]
        assert str(final) in "".join(rows)
    assert {path.name for path in folder.glob("*.png")} == {
        "one-accuracy-by-bytes.png", "one-accuracy-by-seconds.png",
        "two-accuracy-by-bytes.png", "two-accuracy-by-seconds.png",
    }  # fmt: skip
    assert "(one-accuracy-by-bytes.png)" in text

    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["false"])
    main(["study", str(path), "--output", str(folder)])  # all runs are done
    assert (folder / "results.md").read_text() == text
    assert "4 runs, 4 of them done" in capsys.readouterr().out


def test_the_plan_of_a_study_tries_one_round(tmp_path, capsys, forked_runs):
    """Its ten thousand rounds would take minutes; with the two seeds of a row there are 4 runs."""
    path = write(tmp_path, settings=SETTINGS | {"num-rounds": 10_000, "eval-every": 10_000})
    main(["study", str(path), "--plan", "--output", str(tmp_path / "out")])
    printed = capsys.readouterr().out
    assert "4 runs, 0 of them done" in printed
    assert not (tmp_path / "out").exists()
    times = re.findall(r"([\d.]+) s to (start|train a round|evaluate)", printed)
    start, training, evaluation = (float(seconds) for seconds, _ in times)
    assert min(start, training, evaluation) > 0
    hours, minutes = re.findall(r"time: about (?:(\d+) h )?(\d+) min", printed)[0]
    # Printed to two digits.
    expected = 4 * (start + 10_000 * training + evaluation)
    assert 3600 * int(hours or 0) + 60 * int(minutes) == pytest.approx(expected, rel=0.06, abs=60)


@pytest.mark.slow
def test_a_table_draws_spectra_of_runs_with_other_numbers_of_clients(tmp_path, forked_runs):
    rows = {"alone": {"num-clients": 1, "method": "full", "learning-rate": 1e-3}, "three": {}}
    table, folder = {"title": "T", "rows": rows, "spectra": True}, tmp_path / "out"
    assert run_study(write(tmp_path, table, seeds=[0]), folder, jobs=2)
    summaries = [json.loads(p.read_text()) for p in folder.glob("runs/*/*/summary.json")]
    assert {summary["num-clients"] for summary in summaries} == {1, 3}
    assert {path.name for path in folder.glob("*.png")} == {
        "t-accuracy-by-bytes.png", "t-accuracy-by-seconds.png",
        "t-spectrum.png", "t-effective-rank.png",
    }  # fmt: skip
    with (folder / "t-spectrum.csv").open() as file:
        assert {row["group"] for row in csv.DictReader(file)} == {"alone", "three"}


@pytest.mark.slow
def test_a_learning_rate_is_chosen_on_the_validation_split(tmp_path, forked_runs):
    rates = {"learning-rate": [1e-5, 1e-2, 5.0], "seeds": [7]}
    table = {"title": "T", "rows": {"chosen": {}, "given": {"learning-rate": 1e-5}}}
    settings = {"num-rounds": 2, "local-steps": 5, "classifier": "frozen"}
    path = write(tmp_path, table, choose=rates, settings=settings, seeds=[0])
    study, folder = read_study(path), tmp_path / "out"
    chosen = study.tables[0].rows["chosen"]
    assert len(candidates(study, Results(folder))) == 3
    assert list_runs(chosen, Results(folder)) == []  # no rate is chosen yet
    assert run_study(path, folder, jobs=2)
    results = Results(folder)
    assert choice_of(chosen, results).rate == 1e-2
    (final,) = list_runs(chosen, results)
    assert "evaluate-on" not in dict(final.settings)
    text = markdown(study, results)
    assert "| 0.01 |" in text
    assert "| 1e-05 |" in text
    assert "(edge)" not in text


def test_killed_runs_without_output_are_listed(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(spec.PlannedRun, "command", lambda *_: ["sh", "-c", "kill -9 $$"])
    assert not run_study(write(tmp_path), tmp_path / "out", jobs=2)
    assert caplog.text.count("failed: ") == 4
    assert "status -9" in caplog.text
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
def test_studies_keep_the_users_threads(tmp_path, monkeypatch, caplog, jobs, variables, expected):
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


@pytest.mark.slow
def test_a_failed_run_is_listed_and_the_others_continue(tmp_path, caplog, forked_runs):
    table = {"title": "T", "rows": {"good": {}, "bad": {"limits": "max-update-norm=1e-9"}}}
    path = write(tmp_path, table, seeds=[0])
    assert not run_study(path, tmp_path / "out", jobs=1)
    assert "failed" in caplog.text
    assert "round 1: got no valid reply" in caplog.text
    text = markdown(read_study(path), Results(tmp_path / "out"))
    assert "| **" in text
    assert "bad" not in text


def test_mistakes_on_the_command_line_are_errors(tmp_path, capsys):
    missing = tmp_path / "x.yaml"
    assert f"found no file {missing}" in error_of(capsys, "study", missing)
    assert "--jobs 0: expected" in error_of(capsys, "study", __file__, "--jobs", 0)


# The paper's numbers, and its studies.


def test_tables_show_the_papers_numbers(tmp_path):
    def study_of(**table):
        table |= {"title": "A", "rows": {"ravan": {}, "fedit": {"method": "fedit"}}}
        return written.study_of(tmp_path, seeds=[0], settings={}, tables=[table])

    study, results = study_of(paper={"ravan": 84.42}), Results(tmp_path)
    for run in table_runs(study, results):
        accuracy = 0.25 if ("method", "fedit") in run.settings else 0.5
        folder = run.folder(tmp_path) / "run"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(run.resolved))
        final = {"accuracy": accuracy, "loss": 0.9}
        summary = SUMMARY | {"metrics": {"final": final, "best": final}}
        (folder / "summary.json").write_text(json.dumps(summary))
    text = markdown(study, results)
    assert text.splitlines()[4].startswith("|  | accuracy, % | paper, % | by seed |")
    assert "\n| ravan | **50.0** | 84.4 | 50.0 |" in text
    assert "\n| fedit | 25.0 | - | 25.0 |" in text
    rows = list(csv.DictReader(rows_as_csv(study, results).splitlines()))
    assert {row["row"]: row["paper"] for row in rows} == {"ravan": "84.42", "fedit": ""}
    # Another metric than the task's.
    assert "| ravan | **0.900** |" in markdown(study_of(metric="loss"), results)
    # A reference row is not marked as the best.
    last = markdown(study_of(references=["ravan"]), results)
    assert "| ravan | 50.0 |" in last
    assert "| fedit | **25.0** |" in last


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
