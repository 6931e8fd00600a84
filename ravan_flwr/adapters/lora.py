"""Adapt a linear layer by a LoRA: y = W x + b + scale B A x (Hu et al., 2022).

W and b are frozen; B (out, r) and A (r, in) are trained, or B alone. `scale` is LoRA's
alpha / r as one number, so that it means the same for every rank.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters.stored import StoredLinear


class LoRALinear(nn.Module):
    """Add a product of small rank to a frozen linear layer."""

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        self.set_factors(B, A)

    def set_factors(self, B: Tensor, A: Tensor) -> None:
        """Take copies of these as B and A, of whatever rank; both are trained then."""
        expected = (self.base.out_features, len(A)), (len(A), self.base.in_features)
        if (B.shape, A.shape) != expected:
            raise ValueError(
                f"factors of a {self.base.out_features} x {self.base.in_features} layer: got B "
                f"{tuple(B.shape)} and A {tuple(A.shape)}, expected B ({self.base.out_features}, "
                f"r) and A (r, {self.base.in_features})"
            )
        device = self.base.weight.device
        self.B = nn.Parameter(B.detach().to(device, copy=True))
        self.A = nn.Parameter(A.detach().to(device, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        u = F.linear(x, self.A)
        y: Tensor = self.base(x)
        plain = type(self.base) in (nn.Linear, StoredLinear)
        if plain and u.dtype == y.dtype == self.B.dtype:
            # In place: neither a tensor of the product nor a pass that adds it.
            flat = y.view(-1, y.shape[-1]).addmm_(
                u.view(-1, u.shape[-1]), self.B.mT, alpha=self.scale
            )
            return flat.view(y.shape)
        return y + F.linear(u if self.scale == 1 else self.scale * u, self.B)

    def delta_weight(self) -> Tensor:
        """Compute scale B A, (out, in)."""
        return self.scale * self.B @ self.A

    def factors(self) -> tuple[Tensor, Tensor]:
        """Give B and A whose product is the delta-weight, scale included."""
        with torch.no_grad():
            return self.scale * self.B, self.A.detach()
