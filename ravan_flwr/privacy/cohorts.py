"""Say how likely one client decides whether the sum of a drawn cohort may be unmasked.

A cohort of fewer than `least` clients is not summed up, nor is one of more than `most`. If the
others are just one short of either, a client's being drawn says whether all of them count: its
draw then hides it no more. How likely that is bounds what it adds to delta.
"""

import math

from ravan_flwr.secure.fixed_point import MOST_CLIENTS

_OFTEN_ENOUGH = 40  # of more clients than these a part may be drawn
_SLACK = 1e-6  # of delta: what the sizes of cohorts may add to it in all rounds, not counted


def why_not_masked(members: int, rate: float, least: int, rounds: int, delta: float) -> str:
    """Say why a cohort drawn from so many members must not be masked; "" if it may be."""
    if chance_to_decide(members - 1, rate, least, MOST_CLIENTS) * rounds <= _SLACK * delta:
        return ""
    can = [f"{members}, all of them"] if members <= MOST_CLIENTS else []
    can += ["40 to 140 (more, if secure-minimum is above 4)"] if members > _OFTEN_ENOUGH else []
    return (
        f"secure-aggregation = true with privacy = 'client': {members} clients that are drawn with "
        f"probability {rate:.3g} are sometimes fewer than {least} (secure-minimum) "
        f"or more than {MOST_CLIENTS}, and one client would decide whether all are summed up; "
        f"expected clients-per-round = {' or '.join(can)}"
    )


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


def most_rounds(clients: int, rate: float, rounds: int, likely: float = 0.5) -> int:
    """Return in how many rounds each client takes part at most, with that probability for all."""
    if rate >= 1:
        return rounds
    more, least = 0.0, math.log(likely)  # `more`: how likely one client has so many, or more
    for number in range(rounds, 0, -1):
        more += _exactly(number, rounds, rate)
        if more >= 1 or clients * math.log1p(-more) < least:
            return number
    return 0
