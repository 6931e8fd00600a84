"""The time left is what runs take beside their rounds, and what rounds take."""

import pytest
import yaml

from ravan_flwr.runs.console import minutes
from ravan_flwr.studies.choosing import candidates, planned
from ravan_flwr.studies.clock import Clock, Work, work_ahead
from ravan_flwr.studies.reading import read_study
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import Study
from tests.studies import fill, result


@pytest.mark.parametrize("jobs", [1, 2])
def test_runs_of_different_lengths_are_foreseen(jobs, monkeypatch):
    # A run takes 10 seconds, and 2 more for each of its rounds; `jobs` are at work at a time.
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    later = Work(4, 40)
    estimate = Clock(later, started=0.0)
    todo = [5, 1, 5, 9]
    for number, rounds in enumerate(todo, start=1):
        now[0] += (10 + 2 * rounds) / jobs
        rest = Work(len(todo) - number, sum(todo[number:]))
        seconds = (10 * (rest + later).runs + 2 * (rest + later).rounds) / jobs
        assert estimate.left(Work(1, rounds), 2 * rounds, rest, jobs) == minutes(seconds)


def test_runs_of_which_nothing_is_known_count_by_what_they_took(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    estimate = Clock(Work(), started=0.0)
    now[0] += 7.0  # it failed, and has no summary
    assert estimate.left(Work(1, 5), 0.0, Work(2, 10), 1) == "14 s"


def test_only_what_is_not_done_is_ahead_and_a_run_of_two_tables_once(tmp_path):
    rows = {"ravan": {}, "fedit": {"method": "fedit", "num-rounds": 3}}
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": [1e-3, 3e-3, 1e-2], "seeds": [100, 101]},
        "tables": [
            {"title": "T", "rows": rows},
            {"title": "IID", "rates-of": "T", "settings": {"partition": "iid"}, "rows": rows},
            {"title": "T again", "rates-of": "T", "rows": {"ravan": {}}},
        ],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study, results = read_study(path), Results(tmp_path)
    parts = [Study(study.title, [table]) for table in study.tables]
    none, table = Work(), Work(2, 2 * 2) + Work(2, 2 * 3)
    rates = Work(3 * 2, 3 * 2 * 2) + Work(3 * 2, 3 * 2 * 3)
    assert work_ahead(parts, results) == [(rates, table), (none, table), (none, none)]

    for run in candidates(study, results):  # the best is in the middle
        rate = dict(run.settings)["learning-rate"]
        results.note(run, result(0.9 if rate == 3e-3 else 0.5, rate=rate))
    assert work_ahead(parts, results) == [(none, table), (none, table), (none, none)]
    results.note(planned(parts[0], results)[0], result(0.9))
    assert work_ahead(parts, results)[0] == (none, table - Work(1, 2))
    fill(study, results, lambda _: 0.9)
    assert work_ahead(parts, results) == [(none, none)] * 3
