"""Account for what all releases of a run tell together, by Google's `dp-accounting`.

A release is a Gaussian mechanism on the clients that a Poisson draw chose, each with the same rate.
Its privacy loss is composed as a distribution (PLD; Koskela et al., Doroshenko et al.), on a grid
and rounded up: what comes out is an upper bound, and tighter than Renyi's.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

INTERVAL = 1e-3  # of the grid: a tenth of it changes the fourth digit, and takes ten times as long
LEAST, MOST = 0.1, 1000.0  # noise multipliers
CLOSE = 1e-4  # of a multiplier that is looked for


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
    """Return the epsilon of releases of several kinds together.

    ValueError that names the library if it is not there: it is in an extra.
    """
    made = [release for release in releases if release.number]
    if not made:
        return 0.0
    try:
        import dp_accounting  # noqa: PLC0415 (two seconds, and only private runs need it)
        import dp_accounting.pld  # noqa: PLC0415
    except ImportError:
        raise ValueError(
            "privacy: the library dp-accounting is not installed, which accounts for "
            "what a run reveals; pip install 'ravan-flwr[privacy]'"
        ) from None
    account = dp_accounting.pld.PLDAccountant(value_discretization_interval=INTERVAL)
    for release in made:
        gaussian = dp_accounting.GaussianDpEvent(release.multiplier)
        account.compose(dp_accounting.PoissonSampledDpEvent(release.rate, gaussian), release.number)
    return float(account.get_epsilon(delta))


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
    while high / low > 1 + CLOSE:
        middle = (low * high) ** 0.5
        if epsilon_of(middle, rate, delta, releases) <= epsilon:
            high = middle
        else:
            low = middle
    # The least is tried last: far below the answer, an evaluation takes seconds.
    return low if low == LEAST and epsilon_of(low, rate, delta, releases) <= epsilon else high
