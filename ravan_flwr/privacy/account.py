"""Account for what all releases of a run tell together, by Google's `dp-accounting`.

A release is a Gaussian mechanism on the clients that a Poisson draw chose, each with the same rate.
Its privacy loss is composed as a distribution (PLD; Koskela et al., Doroshenko et al.), on a grid
and rounded up: what comes out is an upper bound, and tighter than Renyi's.
"""

import math
from functools import lru_cache
from typing import Any, NamedTuple

INTERVAL = 1e-3  # of the grid: a tenth of it changes the fourth digit, and takes ten times as long
LEAST, MOST = 0.1, 1000.0  # noise multipliers
CLOSE = 1e-4  # of a multiplier that is looked for
_FAR, _HALVINGS = -20.0, 100


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
            "what a run tells; pip install 'ravan-flwr[privacy]'"
        ) from None
    return dp_accounting
