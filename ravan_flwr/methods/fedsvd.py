"""Train FedSVD: FFA-LoRA, refactored by an SVD after every round (Lee et al., 2025).

Clients receive B and A, train B and send it; A is frozen during the round. The server decomposes
the product of the mean and that A, mean_c(B_c) A = U S V^T, and sets

    B <- U S,    A <- V^T

The product is the same, so the mean is exact, as in FFA-LoRA. The rows of A are orthonormal, and
the columns of B are in descending order of their norm, the singular values. A round does not change
the row space of A: it is drawn from the seed once, and contains the rows of every product.
"""

import math
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor

from ravan_flwr.adapters.lora import ProductSum, complete_rows
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import Means
from ravan_flwr.seeding import generator


class FedSVD(NormLimits, LoraMethod):
    """State and broadcast: {"B", "A"}; upload: {"B"}."""

    trained = sent = ("B",)

    @cached_property
    def initial_A(self) -> list[Tensor]:
        """Draw A(0) of every layer with orthonormal rows, as in all later rounds."""
        As = []
        for layer in self.layers:
            random = generator(self.settings.seed, "lora", layer.name)
            no_rows = torch.zeros(0, layer.in_features, dtype=torch.float64)
            As.append(complete_rows(no_rows, self.rank, random).float())
        return As

    def open_round(self, state: Tensors) -> "RefactoredMean":
        return RefactoredMean(self, state)

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {"A": math.sqrt(self.rank * len(self.layers))}


class RefactoredMean(Means):
    """The mean of the clients' B, whose product with their A is decomposed at the end."""

    def __init__(self, method: FedSVD, state: Tensors) -> None:
        super().__init__({"B": state["B"]})
        self.method, self.state = method, state

    def close(self) -> Tensors:
        """Return the next state."""
        mean = self.means["B"]
        means = self.state | {"B": mean.sum / mean.weight}
        Bs, As = [], []
        for B, A in zip(*self.method.split(means), strict=True):
            product = ProductSum(len(B), A.shape[1])
            product.add(B, A)
            U, S, Vh = product.svd()
            Bs.append(U * S)
            As.append(Vh)
        return self.method.pack(Bs, As)


METHOD = FedSVD
