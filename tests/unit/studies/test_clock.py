"""The time left is what runs take beside their rounds, and what rounds take."""

import pytest

from ravan_flwr.runs.console import minutes
from ravan_flwr.studies.clock import Clock, Work


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
