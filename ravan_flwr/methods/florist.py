"""Train FLoRIST: FLoRA, with only the leading part of each round's product (Ramesh & Dass, 2025).

The clients' factors are stacked as in FLoRA (flora.py), and the server decomposes their product:

    sum_c p_c B_c A_c = U S V^T,    p_c = w_c / sum w
    p = the smallest number with S_1^2 + ... + S_p^2 >= tau (S_1^2 + ... + S_r^2)
    W <- W + scale U[:, :p] S[:p] V[:, :p]^T

The decomposition is that of small cores (`ProductSum`), never of the matrix while the stacked rank
is small. Each layer has its own p. The clients' ranks may differ, and every round starts with B = 0
and a new random A, as in FLoRA. tau = TAU = 0.99: 1 % of the energy is lost in a round at most, so
the method is not exact. The paper tunes tau for each data set; its code has 0.9 by default.

The sum of all rounds so far travels with every broadcast, as factors while these are small. A round
adds p to the rank of a layer's factors.
"""

from torch import Tensor

from ravan_flwr.adapters.lora import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.flora import Flora, StackedProducts

TAU = 0.99


class Florist(Flora):
    """State: {"residual", "residual-rank", "rounds"}; upload: {"B", "A"}."""

    ranks_differ = True

    def open_round(self, state: Tensors) -> "LeadingProducts":
        return LeadingProducts(self, state)


class LeadingProducts(StackedProducts):
    """The clients' stacked factors, of which the leading singular directions are kept."""

    def close(self) -> Tensors:
        """Return the next state."""
        leading, ranks = [], []
        for layer, total in zip(self.method.layers, self.sums, strict=True):
            U, S, Vh = total.svd()
            p = smallest_rank(S)
            product = ProductSum(layer.out_features, layer.in_features)
            product.add(U[:, :p] * S[:p], Vh[:p])
            leading.append(product)
            ranks.append(p)
        return self.next_state(leading, ranks)


def smallest_rank(S: Tensor) -> int:
    """Return how many of the largest singular values have the part TAU of the energy."""
    energy = S.square().cumsum(0)
    return 1 + int((energy < TAU * energy[-1]).sum())


METHOD = Florist
