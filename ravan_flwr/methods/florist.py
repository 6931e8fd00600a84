"""Train FLoRIST: FLoRA, with only the leading part of each round's product (Ramesh & Dass, 2025).

The clients' factors are stacked as in FLoRA (flora.py), and the server decomposes their product:

    sum_c p_c B_c A_c = U S V^T,    p_c = w_c / sum w
    p = the smallest number with S_1^2 + ... + S_p^2 >= tau (S_1^2 + ... + S_r^2)
    W <- W + scale U[:, :p] S[:p] V[:, :p]^T

The decomposition is that of small cores (`ProductSum`), never of the matrix while the stacked rank
is small. Each layer has its own p. The clients' ranks may differ, and every round starts with B = 0
and a new random A, as in FLoRA. tau = TAU = 0.99: 1 % of the energy is lost in a round at most, so
the method is not exact. The paper tunes tau for each data set; its code has 0.9 by default.

The sum of all rounds so far travels with every broadcast, as factors while these are small. They
have one rank for all layers, so a round adds the largest p of a layer, and zeros to the others.
"""

from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.flora import Flora, StackedProducts
from ravan_flwr.methods.lora import padded_product

TAU = 0.99


class Florist(Flora):
    """State: {"residual", "residual-rank", "rounds"}; upload: {"B", "A"}."""

    def open_round(self, state: Tensors) -> "LeadingProducts":
        return LeadingProducts(self, state)


class LeadingProducts(StackedProducts):
    """The clients' stacked factors, of which the leading singular directions are kept."""

    def close(self) -> Tensors:
        """Return the next state."""
        parts = [total.svd() for total in self.sums]
        ranks = [smallest_rank(S) for _, S, _ in parts]
        self.sums, self.rank = [], max(ranks)
        for layer, p, (U, S, Vh) in zip(self.method.layers, ranks, parts, strict=True):
            self.sums.append(padded_product(layer, U[:, :p], S[:p], Vh[:p], self.rank))
        return super().close()


def smallest_rank(S: Tensor) -> int:
    """Return how many of the largest singular values have the part TAU of the energy."""
    energy = S.square().cumsum(0)
    return 1 + int((energy < TAU * energy[-1]).sum())


METHOD = Florist
