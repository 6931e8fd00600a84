"""Train FedMomentum: the leading part of the mean stays in the LoRA (Yan et al., 2026).

The server decomposes the mean of the products, and shares it between the factors and W:

    mean_c(B_c A_c) = U S V^T
    B <- U[:, :r] S[:r]^(1/2),    A <- S[:r]^(1/2) V[:, :r]^T
    W <- W + scale U[:, r:] S[r:] V[:, r:]^T

So the mean is exact, as in FedEx-LoRA (fedex_lora.py), and the factors go on in the directions that
the clients' products share; FLoRA (flora.py) begins with B = 0 in every round. The factors are
balanced: of all pairs with the same product, they have the smallest norms. With n clients, the rest
has rank (n - 1) r, and travels like FedEx-LoRA's residual. With one client it is zero.

A singular value of zero would make both factors zero, which have no gradient. Its row of A is then
that of V^T, of norm 1.
"""

import math
from collections.abc import Mapping

from torch.nn import functional as F

from ravan_flwr.adapters.lora import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.fedex_lora import FedExLora
from ravan_flwr.methods.lora import ProductSums

_ZERO = 1e-12  # singular values up to this part of the largest one count as zero


class FedMomentum(FedExLora):
    """State: {"B", "A", "residual", "residual-rank"}; upload: {"B", "A"}."""

    def open_round(self, state: Tensors) -> "SharedProducts":  # type: ignore[override]
        return SharedProducts(self, state)

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        # No balanced factor is longer than the root of |B_c| |A_c| of some client, whose B_c and
        # A_c have been checked.
        return super().norm_bounds(state, alone) | {"B": math.inf, "A": math.inf}


class SharedProducts(ProductSums):
    """The mean of the clients' products, shared between the factors and W at the end."""

    method: FedMomentum

    def close(self) -> Tensors:
        """Return the next state."""
        r, rest = self.method.rank, self.rank - self.method.rank
        Bs, As, residuals = [], [], []
        for layer, total in zip(self.method.layers, self.sums, strict=True):
            U, S, Vh = total.svd()
            S = S / self.weight
            root = S[:r].sqrt()
            nonzero = S[:r] > _ZERO * S[0]
            Bs.append(U[:, :r] * root.where(nonzero, 0.0))
            As.append(root.where(nonzero, 1.0)[:, None] * Vh[:r])
            residual, missing = ProductSum(layer.out_features, layer.in_features), rest - len(S[r:])
            residual.add(F.pad(U[:, r:] * S[r:], (0, missing)), F.pad(Vh[r:], (0, 0, 0, missing)))
            residuals.append(residual)
        scale = self.method.settings.lora_scale
        return self.method.pack(Bs, As) | self.method.add_products(
            self.state, residuals, scale, rest
        )


METHOD = FedMomentum
