"""Choose which learning rates to try: a grid around one, which grows where the best is an edge.

Two rates a decade: 1, 3, 10, 30, ... around such a rate. A rate that is none of these keeps its
own digits in every decade: 5e-5, 1.7e-4, 5e-4.
"""

import math
from collections.abc import Collection

from ravan_flwr.config.keys import KEYS

RATE = "learning-rate"  # what is chosen, where a table of a study does not name another key
_IN_HALVES = (2.9, 3.5)  # steps of a grid with two rates a decade: 3 and 10 / 3
EXTENSIONS = 4  # rates that are added at most, one at a time, where the best is an edge


def grid_around(rate: float) -> list[float]:
    """List the rates from a decade below this one to a decade above, as far as the key takes."""
    digits = rate / 10.0 ** math.floor(math.log10(rate) + 1e-9)
    between = float(f"{rate * (3 if digits < 2.5 else 10 / 3):.1e}")
    rates = (rate / 10, between / 10, rate, between, rate * 10)
    return [_rounded(one) for one in rates if _allowed(one)]


def beyond(best: float, tried: Collection[float], key: str = RATE) -> float | None:
    """Return the rate to try next where the best is the largest or smallest tried; else None."""
    ordered = sorted(tried)
    if len(ordered) < 2 or best not in (ordered[0], ordered[-1]) or ordered[0] <= 0:
        return None
    neighbour = ordered[-2] if best == ordered[-1] else ordered[1]
    further = _further(best, neighbour)
    return further if _allowed(further, key) else None


def _further(best: float, neighbour: float) -> float:
    """Go one step of the grid beyond the best: a decade from the neighbour, or as far again."""
    step = best / neighbour
    if _IN_HALVES[0] < max(step, 1 / step) < _IN_HALVES[1]:
        return _rounded(neighbour * (10 if step > 1 else 0.1))
    return float(f"{best * step:.2g}")


def _allowed(rate: float, name: str = RATE) -> bool:
    """Tell whether the key takes this rate."""
    key = KEYS[name]
    return key.above < rate <= key.high


def _rounded(rate: float) -> float:
    """Drop the last digits, which differ from the decimal number that is meant."""
    return float(f"{rate:.12g}")
