"""Say how likely one client decides whether the sum of a drawn cohort may be unmasked.

A cohort of fewer than `least` clients is not summed up, nor is one of more than `most`. If the
others are just one short of either, a client's being drawn says whether all of them count: its
draw then hides it no more. How likely that is bounds what it adds to delta.
"""

import math


def chance_to_decide(others: int, rate: float, least: int, most: int) -> float:
    """Return how likely it is drawn, and the others are just at one of the limits."""
    if rate >= 1:  # who is always there decides nothing by that
        return 0.0
    return rate * (_exactly(least - 1, others, rate) + _exactly(most, others, rate))


def _exactly(number: int, of: int, rate: float) -> float:
    """Return the binomial probability of so many."""
    if number > of:
        return 0.0
    log = math.lgamma(of + 1) - math.lgamma(number + 1) - math.lgamma(of - number + 1)
    return math.exp(log + number * math.log(rate) + (of - number) * math.log1p(-rate))
