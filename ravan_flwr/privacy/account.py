"""Compute the epsilon of all releases of a run together, with Google's `dp-accounting`.

A release is a Gaussian mechanism on a Poisson sample of the clients, all with the same sampling
rate. Privacy losses are composed as distributions (PLD; Koskela et al., Doroshenko et al.) on a
grid and rounded up. The result is an upper bound, and tighter than Renyi's.
"""

from functools import lru_cache
from typing import NamedTuple

INTERVAL = 1e-3  # of the grid: a tenth of it changes the fourth digit, and takes ten times as long
LEAST_MULTIPLIER, MOST_MULTIPLIER = 0.1, 1000.0  # of the noise
TOLERANCE = 1e-4  # of `multiplier_for`


class Releases(NamedTuple):
    """A number of releases with the same noise and sampling rate."""

    multiplier: float  # of the noise
    rate: float  # of the Poisson sample
    number: int


def find_epsilon(multiplier: float, rate: float, delta: float, releases: int) -> float:
    """Return the epsilon of a number of equal releases at that delta; 0 without releases."""
    return find_total_epsilon((Releases(multiplier, rate, releases),), delta)


@lru_cache(maxsize=4096)
def find_total_epsilon(releases: tuple[Releases, ...], delta: float) -> float:
    """Return the epsilon of releases of several kinds together.

    Raise ValueError if dp-accounting, which an extra installs, is missing.
    """
    nonempty = [release for release in releases if release.number]
    if not nonempty:
        return 0.0
    try:
        import dp_accounting  # noqa: PLC0415 (two seconds, and only private runs need it)
        import dp_accounting.pld  # noqa: PLC0415
    except ImportError:
        raise ValueError(
            "privacy: the library dp-accounting, which computes epsilon, is not installed; "
            "pip install dp-accounting"
        ) from None
    account = dp_accounting.pld.PLDAccountant(value_discretization_interval=INTERVAL)
    for release in nonempty:
        gaussian = dp_accounting.GaussianDpEvent(release.multiplier)
        account.compose(dp_accounting.PoissonSampledDpEvent(release.rate, gaussian), release.number)
    return float(account.get_epsilon(delta))


def multiplier_for(epsilon: float, rate: float, delta: float, releases: int) -> float:
    """Return the smallest noise multiplier with which all releases stay within epsilon."""
    low, high = LEAST_MULTIPLIER, MOST_MULTIPLIER
    highest = find_epsilon(high, rate, delta, releases)
    if highest > epsilon:
        raise ValueError(
            f"epsilon = {epsilon:g}: {releases} releases with delta = {delta:g} take {highest:.4g} "
            f"even with a noise multiplier of {high:g}; raise epsilon or delta, or train fewer "
            "rounds"
        )
    while high / low > 1 + TOLERANCE:
        middle = (low * high) ** 0.5
        if find_epsilon(middle, rate, delta, releases) <= epsilon:
            high = middle
        else:
            low = middle
    # The least multiplier is tried last: far below the result, computing epsilon takes seconds.
    return (
        low
        if low == LEAST_MULTIPLIER and find_epsilon(low, rate, delta, releases) <= epsilon
        else high
    )
