"""Train FlexLoRA: LoRA of a rank by budget, aggregated by products (Bai et al., 2024).

A client with a budget fraction trains r_c = floor(fraction * r) ranks, at least one. The
server decomposes the mean of the products, mean_c(B_c A_c) = U S V^T, and sends each client

    B_c = U[:, :r_c] S[:r_c],    A_c = V^T[:r_c]

The global state is that of rank r, which is also what is evaluated: the best approximation of
rank r to the mean, and exact where the mean has no larger rank. Where it has a smaller one, A
gets further orthonormal rows from the seed, whose part of B is zero: a row of zeros in both
would never train again.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.adapters.lora import complete_rows, product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import ProductSums, RankedLora
from ravan_flwr.seeding import generator


class FlexLora(NormLimits, RankedLora):
    """Let a client train the leading directions of a LoRA."""

    def open_round(self, state: Tensors) -> "MeanOfProducts":
        return MeanOfProducts(self, state)

    def norms_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        # By what A's rows were, since the limit is that of B's own growth.
        return {
            "B": math.hypot(*map(self.product_size, *self.split(upload))) / self.longest_row(start)
        }

    def norms_made(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {
            "A": math.sqrt(self.rank * len(self.layers)),  # the drawn A may be smaller
            "B": self.longest_row(state) * alone.get("B", 0.0),  # or larger
        }

    def product_size(self, B: Tensor, A: Tensor) -> float:
        """Measure what a layer's factors can make of the next state's B."""
        return product_norm(B, A)

    def longest_row(self, factors: Mapping[str, Tensor]) -> float:
        """Find the norm of the longest row of A: 1 after a round, 1 or so before."""
        return max(1.0, *(float(A.norm(dim=1).max()) for A in self.split(factors)[1]))


class MeanOfProducts(ProductSums):
    """Decompose the mean of the clients' products."""

    def close(self) -> Tensors:
        """Make the next state."""
        rank, Bs, As = self.method.rank, [], []
        for layer, total in zip(self.method.layers, self.sums, strict=True):
            U, S, Vh = total.svd()
            k = min(rank, len(S))
            B = torch.zeros(layer.out_features, rank, dtype=torch.float64)
            B[:, :k] = U[:, :k] * (S[:k] / self.weight)
            random = generator(self.method.settings.seed, "complete", layer.name)
            Bs.append(B)
            As.append(complete_rows(Vh[:k], rank, random))
        return self.method.pack(Bs, As)


METHOD = FlexLora
