"""Compute 95 % intervals of means over seeds, by Student's t; differences are paired by seed."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

LEAST = 3  # values of which an interval is told: that of two is 13 times as wide as their spread
CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Hold a mean, how far its interval reaches to both sides, and the p-value that it is zero.

    Of fewer than three values there are no interval and no p-value.
    """

    mean: float
    half: float | None
    p: float | None = None

    @property
    def holds_zero(self) -> bool | None:
        """Tell whether zero lies in it; None where there is no interval."""
        return None if self.half is None else abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """Compute the interval of the values' mean."""
    mean, freedom = statistics.mean(values), len(values) - 1
    if len(values) < LEAST:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Interval(mean, half, p)


def difference(mine: Mapping[int, float], others: Mapping[int, float]) -> Interval | None:
    """Compute the interval of the mean difference of two rows, by the seeds that both have."""
    apart = [mine[seed] - others[seed] for seed in mine if seed in others]
    return interval(apart) if apart else None


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number, by Holm's step-down method (1979)."""
    corrected, least = {}, 0.0
    for number, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - number) * p))
        corrected[name] = least
    return corrected
