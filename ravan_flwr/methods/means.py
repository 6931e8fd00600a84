"""Sum up weighted float32 tensors in float64: their order hardly leaves a trace."""

import math
import statistics
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import Tensor

_BLOCK = 2**17


class Sums(Protocol):
    """Sum up one round's uploads on the server; their order does not matter."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Fold one checked upload into the sums."""

    def close(self) -> dict[str, Tensor]:
        """Make the next global state."""


def add_to(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight * tensor, in float32, to a total in float64; both are contiguous.

    PyTorch makes a float64 copy of the tensor first: block by block, that stays in the processor.
    """
    parts = zip(total.view(-1).split(_BLOCK), tensor.view(-1).split(_BLOCK), strict=True)
    for of_total, part in parts:
        of_total.add_(part, alpha=weight)


class Mean:
    """Keep a running weighted mean of tensors of one shape."""

    def __init__(self, old: Tensor) -> None:
        self.old = old
        self.sum = torch.zeros_like(old, dtype=torch.float64)
        self.weight = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add one tensor."""
        add_to(self.sum, tensor, weight)
        self.weight += weight

    def merge(self, other: "Mean") -> None:
        """Add all that another mean has."""
        self.sum.add_(other.sum)
        self.weight += other.weight

    def close(self) -> Tensor:
        """Compute the mean, or what was there before if nothing came."""
        return (self.sum / self.weight).float() if self.weight else self.old.clone()


class Means:
    """Keep the mean of every tensor of the state."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.means = {name: Mean(tensor) for name, tensor in state.items()}

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload, with the names of the state."""
        for name, mean in self.means.items():
            mean.add(upload[name], weight)

    def close(self) -> dict[str, Tensor]:
        """Make the next state."""
        return {name: mean.close() for name, mean in self.means.items()}


FAR = 8.0  # times the median norm, and the next power of two


class MeansBySize:
    """Leave uploads whose norm is far above the median of all out of the means.

    That is known when all have come. Until then there is one sum for each power of two that a
    norm has: honest ones share a few, and one that is far away has its own, which is dropped.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)
        self.classes: dict[int, Means] = {}  # by the norms' exponents
        self.norms: list[float] = []

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload, with the names of the state."""
        norm = math.hypot(*(float(upload[name].double().norm()) for name in self.state))
        self.norms.append(norm)
        means = self.classes.setdefault(math.frexp(norm)[1], Means(self.state))
        means.add(upload, weight)

    def close(self) -> dict[str, Tensor]:
        """Make the next state."""
        total = Means(self.state)
        most = math.frexp(FAR * statistics.median(self.norms))[1] if self.norms else 0
        for exponent in sorted(key for key in self.classes if key <= most):
            for name, mean in self.classes[exponent].means.items():
                total.means[name].merge(mean)
        return total.close()
