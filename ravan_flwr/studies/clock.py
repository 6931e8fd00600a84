"""Estimate the time that is left, from what runs and their rounds took."""

import time
from dataclasses import dataclass, field

from ravan_flwr.runs.console import minutes


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
