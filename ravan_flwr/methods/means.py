"""Running weighted means of float32 tensors, kept in float64: their order hardly leaves a trace."""

from collections.abc import Mapping

import torch
from torch import Tensor


class Mean:
    """A running weighted mean of tensors of one shape."""

    def __init__(self, old: Tensor) -> None:
        self.old = old
        self.sum = torch.zeros_like(old, dtype=torch.float64)
        self.weight = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """One more."""
        self.sum.add_(tensor, alpha=weight)
        self.weight += weight

    def close(self) -> Tensor:
        """The mean, or what was there before if nothing came."""
        return (self.sum / self.weight).float() if self.weight else self.old.clone()


class Means:
    """The mean of every tensor of the state."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.means = {name: Mean(tensor) for name, tensor in state.items()}

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """One more upload, with the names of the state."""
        for name, mean in self.means.items():
            mean.add(upload[name], weight)

    def close(self) -> dict[str, Tensor]:
        """The next state."""
        return {name: mean.close() for name, mean in self.means.items()}
