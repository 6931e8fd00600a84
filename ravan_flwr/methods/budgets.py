"""Choose the clients' budget fractions: how much of the adapters each of them can train.

The paper gives every client a budget of 1/4, 1/2, 3/4 or 1 of the largest, fixed for the run. It
draws the mix of clients as bars without numbers, so the numbers of `BUDGETS` are ours.
"""

import hashlib
import math

BUDGET_FRACTIONS = (0.25, 0.5, 0.75, 1.0)

# By distribution, the proportion of clients at each of the BUDGET_FRACTIONS.
BUDGETS: dict[str, tuple[float, float, float, float]] = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.25, 0.15, 0.1),
    # training/device_work.py sets the budget fractions of simulated devices.
    "by-speed": (0.0, 0.0, 0.0, 1.0),
}

_GOLDEN = (math.sqrt(5) - 1) / 2


def budget_fraction(distribution: str, seed: int, partition_id: int) -> float:
    """Return a client's budget fraction, a function of (distribution, seed, partition id) alone.

    Steps of the golden ratio from a seeded start fill [0, 1) evenly. So the clients' proportions
    are close to those of the distribution for any number of clients; independent draws would
    scatter around them.
    """
    digest = hashlib.sha256(f"budget {seed}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") / 2**64
    position = (start + partition_id * _GOLDEN) % 1.0
    cumulative = 0.0
    for fraction, probability in zip(
        BUDGET_FRACTIONS, BUDGETS[distribution.partition(":")[0]], strict=True
    ):
        cumulative += probability
        if position < cumulative:
            return fraction
    return BUDGET_FRACTIONS[-1]


def affordable(fraction: float, number: int) -> int:
    """Return how many of `number` heads or ranks fit a budget: floor(fraction * number), >= 1."""
    # 0.29 of 100 must give 29, although 0.29 * 100 is 28.999999999999996 in floating point.
    return max(1, math.floor(fraction * number + 1e-9))
