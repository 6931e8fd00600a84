"""Estimate the time that is left, from what runs and their rounds took."""

import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ravan_flwr.runs.console import minutes
from ravan_flwr.studies.choosing import candidates, planned, runs_of
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import PlannedRun, Study


@dataclass(frozen=True)
class Work:
    """Count runs, and the rounds in them: a run takes some time before its first round."""

    runs: int = 0
    rounds: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.runs + other.runs, self.rounds + other.rounds)

    def __sub__(self, other: "Work") -> "Work":
        return Work(self.runs - other.runs, self.rounds - other.rounds)


@dataclass
class Clock:
    """Measures what runs and their rounds take, and estimates the time left for the whole study."""

    later: Work  # what follows this part: the tables, while rates are chosen
    done: Work = Work()
    in_rounds: float = 0.0  # seconds of the runs that are done
    started: float = field(default_factory=time.monotonic)

    def left(self, run: Work, in_rounds: float, now: Work, jobs: int) -> str:
        """Count a run, and estimate the time for the work of `now` and all that follows."""
        self.done, self.in_rounds = self.done + run, self.in_rounds + in_rounds
        beside = max(0.0, (time.monotonic() - self.started) * jobs - self.in_rounds)
        todo = now + self.later
        seconds = todo.runs * beside / self.done.runs
        seconds += todo.rounds * self.in_rounds / self.done.rounds
        return minutes(seconds / jobs)


def work_ahead(parts: Sequence[Study], results: Results) -> list[tuple[Work, Work]]:
    """Count what is still to be run to choose the rates of each part, and for its tables.

    A run of several tables counts once, for the first. What depends on runs that are not done is
    left out: rates beyond an edge, and those that turn out to be as good as the best.
    """
    counted: set[str] = set()

    def lacking(runs: Iterable[PlannedRun]) -> Work:
        new = {run.name: run for run in runs if run.name not in counted and not results.of(run)}
        counted.update(new)
        return sum((Work(1, run.num_rounds) for run in new.values()), start=Work())

    return [
        (lacking(candidates(part, results)), lacking(_of_tables(part, results))) for part in parts
    ]


def _of_tables(part: Study, results: Results) -> Iterator[PlannedRun]:
    """Go through the runs of the tables; with any rate where none is chosen."""
    yield from planned(part, results)
    for row in part.rows:
        if not runs_of(row, results):
            yield from row.runs(row.rates[0])
