"""Count how many clients are expected to train each number of the state, before a round."""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Method, split_classifier
from ravan_flwr.methods.extensions import sums_changes


def expected_clients(
    method: Method, state: Mapping[str, Tensor], clients: Mapping[float, float], rate: float
) -> dict[str, Tensor]:
    """Count them for each tensor, to which the counts broadcast.

    `clients` has how many there are by share of the budget, and each takes part with that rate.
    Where a method's mean is over all, all count for what one of them can train.
    """
    sums, (own, classifier) = sums_changes(method), split_classifier(state)
    total = {name: torch.zeros([1] * t.ndim, dtype=torch.float64) for name, t in own.items()}
    for share, number in clients.items():
        for name, chance in sums.coverage(own, share).items():
            total[name] = total[name] + rate * number * chance.double()
    everyone = torch.full([1], rate * sum(clients.values()), dtype=torch.float64)
    if sums.mean_over_cohort:
        total = {name: torch.where(t > 0, everyone, t) for name, t in total.items()}
    return total | dict.fromkeys(classifier, everyone)


def noise_norm(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], deviation: float
) -> float:
    """Return the norm that noise has in the next state, where that is its size in the sum."""
    squares = 0.0
    for name, tensor in state.items():
        counts = expected[name][expected[name] > 0]
        each = tensor.numel() / max(1, expected[name].numel())  # numbers to which a count belongs
        squares += each * float(counts.pow(-2).sum())
    return float(deviation * squares**0.5)
