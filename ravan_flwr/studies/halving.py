"""Run a tuning, rung by rung: measure rates, keep the better ones, go beyond an edge."""

import logging
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import LOWER_IS_BETTER
from ravan_flwr.studies.clock import Clock, Work
from ravan_flwr.studies.rates import beyond
from ravan_flwr.studies.running import How, run_missing, words_of_run
from ravan_flwr.studies.spec import final_of
from ravan_flwr.studies.tuning import Rung, Tuning

STUDENT = {1: 6.314, 2: 2.920}  # degrees of freedom -> Student's t, one-sided, 95 %

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Score:
    """Hold what a rate has reached on the examples held back, by seed."""

    metric: str
    values: list[float]
    losses: list[float]  # empty where none is measured

    @classmethod
    def of(cls, done: Sequence[Summary]) -> "Score":
        """Read it from the summaries of one rate's runs."""
        finals = [final_of(summary) for summary in done]
        measured = [summary["metrics"]["final"] for summary in done]
        losses = [final["loss"] for final in measured if "loss" in final]
        return cls(finals[0][0], [value for _, value in finals], losses)

    def __str__(self) -> str:
        return f"{self.mean:.4f}" + (f" ± {self.spread:.4f}" if len(self.values) > 1 else "")

    @property
    def mean(self) -> float:
        return statistics.mean(self.values)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0

    @property
    def merits(self) -> list[float]:
        """Return the values such that larger is better."""
        sign = -1.0 if self.metric in LOWER_IS_BETTER else 1.0
        return [sign * value for value in self.values]

    @property
    def order(self) -> tuple[float, float]:
        """Compare by the mean metric, of equals by the smaller loss."""
        return statistics.mean(self.merits), -statistics.mean(self.losses or [0.0])

    def beats(self, other: "Score") -> bool:
        """Tell whether it is better by more than noise: in a t-test over the seeds, at 95 %."""
        apart = [mine - its for mine, its in zip(self.merits, other.merits, strict=True)]
        if len(apart) < 2:
            return self.order > other.order
        error = statistics.stdev(apart) / math.sqrt(len(apart))
        return statistics.mean(apart) > STUDENT[len(apart) - 1] * error


@dataclass(frozen=True)
class Measured:
    """Hold the scores of a rung, by rate."""

    rung: Rung
    scores: dict[float, Score]

    def ranked(self) -> list[float]:
        """List the rates, the best first; of equals the smaller."""
        return sorted(self.scores, key=lambda rate: (*self.scores[rate].order, -rate), reverse=True)

    def alike(self) -> list[float]:
        """List the rates that the best one does not beat by more than noise, from the smallest."""
        best = self.scores[self.ranked()[0]]
        return sorted(rate for rate, score in self.scores.items() if not best.beats(score))


@dataclass
class Choice:
    """Hold what a tuning has measured; after the last rung, the rate that it chose."""

    tuning: Tuning
    folder: Path
    tried: list[float]
    rungs: list[Measured] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)  # a run's words -> why

    @property
    def rate(self) -> float:
        return self.rungs[-1].ranked()[0]

    @property
    def score(self) -> Score:
        return self.rungs[-1].scores[self.rate]

    @property
    def at_the_edge(self) -> bool:
        return self.rate in (min(self.tried), max(self.tried))


def tune(tuning: Tuning, folder: Path, how: How) -> Choice:
    """Run what is not done yet; RuntimeError where every rate of a rung failed."""
    choice = Choice(tuning, folder, sorted(tuning.rates))
    clock = Clock(sum((rung.work for rung in tuning.rungs), start=Work()))
    rates: Sequence[float] = tuning.rates
    for rung in tuning.rungs:
        clock.later -= rung.work
        scores = _measure(choice, rung, rates, how, clock)
        if not scores:
            first, reason = next(iter(choice.failed.items()))
            raise RuntimeError(f"every learning rate failed; the first: {first}: {reason}")
        while (more := _following(choice, Measured(rung, scores))) is not None:
            log.info("the best is the last of the rates tried: %g as well", more)
            choice.tried.append(more)
            scores |= _measure(choice, rung, [more], how, clock)
        measured = Measured(rung, scores)
        choice.rungs.append(measured)
        following = tuning.rungs[len(choice.rungs) : len(choice.rungs) + 1]
        rates = [rate for after in following for rate in measured.ranked()[: after.rates]]
    return choice


def _following(choice: Choice, measured: Measured) -> float | None:
    """Return the rate to try as well, where the best is an edge of all that were tried."""
    tuning = choice.tuning
    if len(choice.tried) - len(tuning.rates) >= tuning.extensions:
        return None
    best, *others = measured.ranked()
    if any(measured.scores[rate].mean == measured.scores[best].mean for rate in others):
        return None  # where several rates reach the same, nothing says that others are better
    return beyond(best, choice.tried)


def _measure(
    choice: Choice, rung: Rung, rates: Sequence[float], how: How, clock: Clock
) -> dict[float, Score]:
    """Run these rates, and score those of which no run failed."""
    folder, scores = choice.folder, {}
    runs = {rate: choice.tuning.runs(rung, rate) for rate in sorted(rates)}
    planned = [run for one in runs.values() for run in one]
    failed = run_missing(str(replace(rung, rates=len(rates))), planned, folder, how, clock)
    for run, reason in failed.items():
        choice.failed[words_of_run(run)] = reason
    for rate, one in runs.items():
        done = [summary for run in one if (summary := run.summary(folder)) is not None]
        if len(done) == len(one):
            scores[rate] = Score.of(done)
            log.info("  %g: %s %s", rate, scores[rate].metric, scores[rate])
    return scores
