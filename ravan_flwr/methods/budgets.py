"""Say what share of the trainable parameters each client can afford.

The paper gives every client a budget of 1/4, 1/2, 3/4 or 1 of the largest, fixed for the
run, and draws the client mix as bars without numbers; the fractions below are ours.
"""

import hashlib
import math

SHARES = (0.25, 0.5, 0.75, 1.0)

# The fraction of the clients at each share.
BUDGETS: dict[str, tuple[float, float, float, float]] = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.25, 0.15, 0.1),
}

_GOLDEN = (math.sqrt(5) - 1) / 2


def budget_share(distribution: str, seed: int, partition_id: int) -> float:
    """Draw the share of one client: a function of (seed, partition id) and of nothing else.

    Steps of the golden ratio from a seeded start fill [0, 1) evenly, so that any number of
    clients comes close to the fractions, where independent draws would scatter about them.
    """
    digest = hashlib.sha256(f"budget {seed}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") / 2**64
    position = (start + partition_id * _GOLDEN) % 1.0
    reached = 0.0
    for share, fraction in zip(SHARES, BUDGETS[distribution], strict=True):
        reached += fraction
        if position < reached:
            return share
    return SHARES[-1]


def affordable(share: float, number: int) -> int:
    """Count the heads, or the ranks, that a share pays for: floor(share * number), at least 1."""
    # A share such as 0.29 of 100 must give 29 although its product is 28.999999999999996.
    return max(1, math.floor(share * number + 1e-9))
