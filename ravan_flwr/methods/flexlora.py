"""Train FlexLoRA: a LoRA whose rank depends on the budget, averaged as products (Bai et al., 2024).

A client with a budget fraction trains r_c = floor(fraction * r) ranks, at least one. The server
decomposes the mean of the products, mean_c(B_c A_c) = U S V^T, and sends each client

    B_c = U[:, :r_c] S[:r_c],    A_c = V^T[:r_c]

The global state has rank r, and is evaluated. It is the best approximation of rank r to the mean,
and exact if the mean has at most rank r. If the mean has a smaller rank, A gets further orthonormal
rows from the seed, and the columns of B for them are zero. With zeros in both factors these ranks
would have no gradient.
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
    """State and upload: {"B", "A"}; a client trains the leading r_c singular directions."""

    def open_round(self, state: Tensors) -> "MeanOfProducts":
        return MeanOfProducts(self, state)

    def norms_if_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        # Divided by the row norm of the A that was sent: the limit is that of B's growth.
        return {
            "B": math.hypot(*map(self.product_bound, *self.split(upload)))
            / self.max_row_norm(start)
        }

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {
            "A": math.sqrt(self.rank * len(self.layers)),  # A(0) may have a smaller norm
            "B": self.max_row_norm(state) * alone.get("B", 0.0),  # A(0) may have longer rows
        }

    def product_bound(self, B: Tensor, A: Tensor) -> float:
        """Return an upper bound of the norm of a layer's next B, from one upload's factors."""
        return product_norm(B, A)

    def max_row_norm(self, factors: Mapping[str, Tensor]) -> float:
        """Return the largest row norm of A, at least 1: it is 1 after a round, about 1 before."""
        return max(1.0, *(float(A.norm(dim=1).max()) for A in self.split(factors)[1]))


class MeanOfProducts(ProductSums):
    """The mean of the clients' products, decomposed at the end."""

    def close(self) -> Tensors:
        """Return the next state."""
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
