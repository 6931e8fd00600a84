"""Compute 95 % intervals of means over seeds, by Student's t; differences are paired by seed.

Student's t of n degrees of freedom is Z / sqrt(V / n). For whole n the probability of |t| < x is
a finite sum of cosines (Abramowitz and Stegun, 26.7.3 and 26.7.4), so that no table is needed.
"""

import functools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

LEAST = 3  # values of which an interval is told: that of two is 13 times as wide as their spread
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Hold a mean, and how far its interval reaches to both sides; None: of too few values."""

    mean: float
    half: float | None

    @property
    def holds_zero(self) -> bool | None:
        """Tell whether zero lies in it; None where there is no interval."""
        return None if self.half is None else abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """Compute the interval of the values' mean."""
    mean = statistics.mean(values)
    if len(values) < LEAST:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    return Interval(mean, students_t(len(values) - 1) * error)


def difference(mine: Mapping[int, float], others: Mapping[int, float]) -> Interval | None:
    """Compute the interval of the mean difference of two rows, by the seeds that both have."""
    apart = [mine[seed] - others[seed] for seed in mine if seed in others]
    return interval(apart) if apart else None


@functools.cache
def students_t(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Find the t within which the distribution has that probability, by halving."""
    low, high = 0.0, 1.0
    while _within(high, freedom) < confidence:
        high *= 2
    while (middle := (low + high) / 2) not in (low, high):
        low, high = (middle, high) if _within(middle, freedom) < confidence else (low, middle)
    return high


def _within(t: float, freedom: int) -> float:
    """Compute the probability of a value between -t and t."""
    angle, odd = math.atan(t / math.sqrt(freedom)), freedom % 2
    term, total = math.cos(angle) if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= math.cos(angle) ** 2 * (power + 1) / (power + 2)
    if odd:
        return 2 / math.pi * (angle + math.sin(angle) * total)
    return math.sin(angle) * total
