"""Account for what all releases of a run tell together, by Google's `dp-accounting`.

A release is a Gaussian mechanism on the clients that a Poisson draw chose, each with the same rate.
Its privacy loss is composed as a distribution (PLD; Koskela et al., Doroshenko et al.), on a grid
and rounded up: what comes out is an upper bound, and tighter than Renyi's.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

from ravan_flwr.secure.fixed_point import MOST_CLIENTS

INTERVAL = 1e-3  # of the grid: a tenth of it changes the fourth digit, and takes ten times as long
LEAST, MOST = 0.1, 1000.0  # noise multipliers
CLOSE = 1e-4  # of a multiplier that is looked for
_FAR, _HALVINGS = -20.0, 100


@dataclass(frozen=True)
class StepNoise:
    """Say to what the gradients of a client's examples are clipped, and how much noise they get."""

    multiplier: float
    norm: float


class Releases(NamedTuple):
    """Count releases of one kind."""

    multiplier: float  # of the noise
    rate: float  # of the draw
    number: int


def epsilon_of(multiplier: float, rate: float, delta: float, releases: int) -> float:
    """Return the epsilon of so many releases at that delta; 0 of none."""
    return epsilon_of_all((Releases(multiplier, rate, releases),), delta)


@lru_cache(maxsize=4096)
def epsilon_of_all(releases: tuple[Releases, ...], delta: float) -> float:
    """Return the epsilon of releases of several kinds together."""
    made = [one for one in releases if one.number]
    if not made:
        return 0.0
    library = _library()
    account = library.pld.PLDAccountant(value_discretization_interval=INTERVAL)
    for one in made:
        gaussian = library.GaussianDpEvent(one.multiplier)
        account.compose(library.PoissonSampledDpEvent(one.rate, gaussian), one.number)
    return float(account.get_epsilon(delta))


def epsilon_seen(inverse_squares: float, delta: float) -> float:
    """Return the epsilon of Gaussian mechanisms that no draw hides; 0 of none.

    Several are one, whose 1 / z^2 is the sum of theirs. What it spends is known exactly (Balle and
    Wang, 2018): with m = 1 / z, delta = F(m/2 - epsilon/m) - e^epsilon F(-m/2 - epsilon/m), where F
    is the normal distribution.
    """
    if not inverse_squares:
        return 0.0
    m, low, high = math.sqrt(inverse_squares), 0.0, 1.0
    while _delta_of(m, high) > delta:
        high *= 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _delta_of(m, middle) > delta else (low, middle)
    return high


def _delta_of(m: float, epsilon: float) -> float:
    return math.exp(_log_normal(m / 2 - epsilon / m)) - math.exp(
        epsilon + _log_normal(-m / 2 - epsilon / m)
    )


def _log_normal(x: float) -> float:
    """Return the logarithm of the normal distribution at x."""
    if x > _FAR:
        return math.log(math.erfc(-x / math.sqrt(2)) / 2)
    # Where that is too small for a number: by its series, which is as exact so far out.
    series = 1 - x**-2 + 3 * x**-4 - 15 * x**-6
    return -x * x / 2 - math.log(-x * math.sqrt(2 * math.pi)) + math.log(series)


def multiplier_for(epsilon: float, rate: float, delta: float, releases: int) -> float:
    """Find the least noise multiplier with which so many releases stay within epsilon."""
    low, high = LEAST, MOST
    most = epsilon_of(high, rate, delta, releases)
    if most > epsilon:
        raise ValueError(
            f"epsilon = {epsilon:g}: {releases} releases with delta = {delta:g} take {most:.4g} "
            f"even with a noise multiplier of {high:g}; raise epsilon or delta, or train fewer "
            "rounds"
        )
    if epsilon_of(low, rate, delta, releases) <= epsilon:
        return low
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        if epsilon_of(middle, rate, delta, releases) <= epsilon:
            high = middle
        else:
            low = middle
    return high


def _library() -> Any:
    """Import the library, which is in an extra; ValueError that names it if it is not there."""
    try:
        import dp_accounting  # noqa: PLC0415 (two seconds, and only private runs need it)
        import dp_accounting.pld  # noqa: PLC0415
    except ImportError:
        raise ValueError(
            "privacy: the library dp-accounting is not installed, which accounts for "
            "what a run reveals; pip install 'ravan-flwr[privacy]'"
        ) from None
    return dp_accounting


# A cohort of fewer than `least` clients is not unmasked, nor is one of more than MOST_CLIENTS. If
# the others are just one short of either, a client's being drawn says whether all of them count:
# its draw then hides it no more. How likely that is bounds what it adds to delta.

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
