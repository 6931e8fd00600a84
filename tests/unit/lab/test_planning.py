"""The plan of a study: the number of its runs, and their time."""

import logging

import pytest

from ravan_flwr.lab import planning
from ravan_flwr.lab.choosing import candidates
from ravan_flwr.lab.planning import RunTimes, plan_study, planned_runs, runs_beyond, try_round
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.running import RunOptions
from ravan_flwr.lab.spec import PlannedRun, read_study
from tests.studies import fill, result
from tests.unit.lab.written import written

ROWS = {"ravan": {}, "fedit": {"method": "fedit"}}
RATES = {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101], "extensions": 3}
TABLES = [
    {"title": "T", "rows": ROWS},
    {"title": "IID", "rates-of": "T", "settings": {"partition": "iid"}, "rows": ROWS},
    {"title": "T again", "rates-of": "T", "rows": {"ravan": {}}},
]
# 2 rows of 3 rates with 2 seeds; then 2 rows with 3 seeds, in T and in IID; T again is a part of T.
CHOICE, EACH_TABLE = 2 * 3 * 2, 2 * 3


@pytest.fixture
def path(tmp_path):
    return written(tmp_path, seeds=[0, 1, 2], choose=RATES, tables=TABLES)


@pytest.fixture
def printed(caplog):
    caplog.set_level(logging.INFO, logger=planning.__name__)
    return lambda: caplog.text


def number_of_runs(study, results):
    return len({run.name for table in study.tables for run in planned_runs(table, results)})


def test_runs_are_counted_before_and_after_their_rates_are_chosen(path, tmp_path):
    study, results = read_study(path), Results(tmp_path)
    assert number_of_runs(study, results) == CHOICE + 2 * EACH_TABLE
    assert runs_beyond(study, results) == 2 * 3 * 2  # 3 extensions of 2 rows, with 2 seeds
    fill(study, results, lambda settings: -abs(settings["learning-rate"] - 3e-3))
    assert number_of_runs(study, results) == CHOICE + 2 * EACH_TABLE
    assert runs_beyond(study, results) == 0


def test_runs_that_choose_by_the_other_seeds_are_those_of_the_table(tmp_path):
    table = {"title": "T", "rows": ROWS, "leave-one-seed-out": True}
    choose = {"learning-rate": [1e-3, 3e-3], "seeds": [7]}
    study = read_study(written(tmp_path, seeds=[0, 1, 2], choose=choose, tables=[table]))
    assert number_of_runs(study, Results(tmp_path)) == 2 * 2 * 3


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_time_is_that_of_the_runs_that_are_left(jobs, path, tmp_path, printed, monkeypatch):
    """A round of each table is tried, but for a table whose runs are those of another."""
    study, results = read_study(path), Results(tmp_path)
    for run in candidates(study, results)[:4]:
        results.add(run, result(0.5))
    tried = []

    def try_one(run, options):
        tried.append(run)
        return RunTimes(start=60, training=20, evaluation=10)

    monkeypatch.setattr(planning, "try_round", try_one)
    plan_study(path, tmp_path, RunOptions(jobs=jobs))
    assert len(tried) == 2
    assert all(results.of(run) is None for run in tried)
    # Two rounds. An evaluation in each where the server evaluates, and one where clients do.
    seconds = 8 * (60 + 2 * 20 + 10) + 12 * (60 + 2 * 20 + 2 * 10)
    assert f"{CHOICE + 12} runs, 4 of them done" in printed()
    assert f"time: about {seconds // jobs // 60} min {seconds // jobs % 60:02d} s" in printed()


def test_nothing_is_tried_for_a_study_that_is_done(path, tmp_path, printed, monkeypatch):
    study, results = read_study(path), Results(tmp_path)
    fill(study, results, lambda settings: -abs(settings["learning-rate"] - 3e-3))
    monkeypatch.setattr(planning, "try_round", None)
    plan_study(path, tmp_path, RunOptions())
    assert f"{CHOICE + 12} runs, {CHOICE + 12} of them done" in printed()


def test_a_run_that_ends_before_its_first_round_is_named(path, monkeypatch):
    run = planned_runs(read_study(path).tables[0], Results(path.parent))[0]
    monkeypatch.setattr(PlannedRun, "command", lambda *_: ["sh", "-c", "echo no memory >&2; false"])
    with pytest.raises(RuntimeError, match="learning-rate=0.001 .* first round is done: no memory"):
        try_round(run, RunOptions())
