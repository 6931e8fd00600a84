"""Compare learning rates by what they reach on held-back examples, seed by seed."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ravan_flwr.specs import LOWER_IS_BETTER
from ravan_flwr.studies.intervals import interval
from ravan_flwr.studies.rates import RATE, beyond
from ravan_flwr.studies.results import Result


@dataclass(frozen=True)
class Score:
    """Hold what a rate has reached on the examples held back, by seed."""

    metric: str
    values: list[float]
    losses: list[float]  # empty where none is measured

    @classmethod
    def of(cls, done: Sequence[Result]) -> "Score":
        """Read it from the results of one rate's runs."""
        losses = [result.final["loss"] for result in done if "loss" in result.final]
        return cls(done[0].metric, [result.value() for result in done], losses)

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
        """Tell whether it is better by more than noise.

        That is: the 95 % interval of the differences, paired by seed, lies above zero. Two seeds
        have no interval, and then the better mean beats.
        """
        apart = interval([a - b for a, b in zip(self.merits, other.merits, strict=True)])
        if apart.holds_zero is None:
            return self.order > other.order
        return apart.mean > 0 and not apart.holds_zero


Scores = Mapping[float, Score]  # by learning rate


def ranked(scores: Scores) -> list[float]:
    """List the rates, the best first; of equals the smaller."""
    return sorted(scores, key=lambda rate: (*scores[rate].order, -rate), reverse=True)


def alike(scores: Scores) -> list[float]:
    """List the rates that the best one does not beat by more than noise, from the smallest."""
    best = scores[ranked(scores)[0]]
    return sorted(rate for rate, score in scores.items() if not best.beats(score))


def following(scores: Scores, tried: Sequence[float], key: str = RATE) -> float | None:
    """Return the rate to try as well, where the best is an edge of all that were tried."""
    best, *others = ranked(scores)
    if any(scores[rate].mean == scores[best].mean for rate in others):
        return None  # where several rates reach the same, nothing says that others are better
    return beyond(best, tried, key)
