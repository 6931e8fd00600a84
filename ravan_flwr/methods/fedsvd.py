"""Train FedSVD: FFA-LoRA, its factors made anew by an SVD after every round (Lee et al., 2025).

Clients get B and A, train B and send it; A is frozen in their hands. The server takes the mean and
decomposes its product with the A that they had, mean_c(B_c) A = U S V^T. Then

    B <- U S,    A <- V^T

which is the same product, so that nothing is lost: the mean is exact, as FFA-LoRA's is. The rows
of A are orthonormal, and the columns of B are ordered by what they add to the weight. A product
has no rows outside of what the rows of A span: that is drawn from the seed once, and stays.
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
from ravan_flwr.methods.tensors import Mean
from ravan_flwr.seeding import generator


class FedSVD(NormLimits, LoraMethod):
    """Keep the state {"B", "A"}, which is sent whole; an upload is {"B"}."""

    trained = sent = ("B",)

    @cached_property
    def initial_A(self) -> list[Tensor]:
        """Draw A(0) of every layer, with orthonormal rows from the first round on."""
        As = []
        for layer in self.layers:
            random = generator(self.settings.seed, "lora", layer.name)
            nothing = torch.zeros(0, layer.in_features, dtype=torch.float64)
            As.append(complete_rows(nothing, self.rank, random).float())
        return As

    def open_round(self, state: Tensors) -> "Refactored":
        return Refactored(self, state)

    def norms_made(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {"A": math.sqrt(self.rank * len(self.layers))}


class Refactored:
    """Sum up the clients' B, and decompose what their mean makes with the A that they had."""

    def __init__(self, method: FedSVD, state: Tensors) -> None:
        self.method, self.state = method, state
        self.mean = Mean(state["B"])

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B."""
        self.mean.add(upload["B"], weight)

    def close(self) -> Tensors:
        """Make the next state."""
        means = self.state | {"B": self.mean.sum / self.mean.weight}
        Bs, As = [], []
        for B, A in zip(*self.method.split(means), strict=True):
            product = ProductSum(len(B), A.shape[1])
            product.add(B, A)
            U, S, Vh = product.svd()
            Bs.append(U * S)
            As.append(Vh)
        return self.method.pack(Bs, As)


METHOD = FedSVD
