"""Train FRLoRA: every round adds to W, and starts from W's principal directions (Yan et al., 2025).

With W = U S V^T the pretrained weight, every round starts with

    B_0 = U[:, :r] (S[:r] / scale)^(1/2),    A_0 = (S[:r] / scale)^(1/2) V[:, :r]^T

and with scale B_0 A_0 taken out of the frozen weight, so that the model is the server's. The server
averages B and A, and adds to the frozen weight what their product has gained:

    W <- W + scale (mean_c(B_c) mean_c(A_c) - B_0 A_0)

So the sum of the rounds has a larger rank than r. As in FedIT (fedit.py), the product of the means
is not the mean of the products: the method is not exact. With one client a round it is.

The gain of all rounds so far travels with every broadcast (`ResidualLora`). B_0 and A_0 travel,
too: machines round a decomposition differently, and similar singular values would turn its vectors.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.adapters.lora import ProductSum, svd
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.fedex_lora import FedExLora
from ravan_flwr.methods.lora import BOTH, ResidualLoRALinear
from ravan_flwr.methods.tensors import Means


class PrincipalLoRALinear(ResidualLoRALinear):
    """A LoRA layer that starts with the principal part of its weight, which the base leaves out."""

    @cached_property
    def principal(self) -> tuple[Tensor, Tensor]:
        """Decompose the pretrained weight; return B_0 and A_0, of the rank of B and A."""
        W, rank = self.pretrained, len(self.A)
        if W.is_meta:  # the command `plan` has shapes only
            return torch.zeros(len(W), rank), torch.zeros(rank, W.shape[1])
        U, S, Vh = svd(W.cpu().double())
        root = (S[:rank] / self.scale).sqrt()
        return (U[:, :rank] * root).float(), (root[:, None] * Vh[:rank]).float()

    def set_residual(self, residual: Tensor | None) -> None:
        """Set the base's weight to the pretrained one plus the residual, without scale B A."""
        start = -LoRALinear.delta_weight(self).detach()
        super().set_residual(start if residual is None else start + residual.to(start.device))


class FRLora(FedExLora):
    """State: {"B", "A", "residual", "residual-rank"}, of which B and A stay; upload: {"B", "A"}."""

    def adapt(self, layer: Layer, linear: nn.Linear) -> PrincipalLoRALinear:
        B, A = torch.zeros(layer.out_features, self.rank), torch.zeros(self.rank, layer.in_features)
        return PrincipalLoRALinear(linear, B, A, self.settings.lora_scale)

    def initial_state(self, adapters: Sequence[Any]) -> Tensors:
        Bs, As = zip(*(adapter.principal for adapter in adapters), strict=True)
        return self.pack(Bs, As) | self.empty_residual()

    def idle_state(self, adapters: Sequence[Any]) -> Tensors:
        # Without the decomposition, which the server alone needs.
        shapes = self.shapes(self.rank, BOTH)
        return {name: torch.zeros(shape) for name, shape in shapes.items()} | self.empty_residual()

    def fingerprint(self, adapters: Sequence[Any]) -> list[float]:
        return []  # nothing is made from the seed, and the decomposition is sent

    def open_round(self, state: Tensors) -> "Gains":  # type: ignore[override]
        return Gains(self, state)


class Gains(Means):
    """The means of B and A, whose product is compared with that of the start at the end."""

    def __init__(self, method: FRLora, state: Tensors) -> None:
        super().__init__({name: state[name] for name in BOTH})
        self.method, self.state = method, state

    def close(self) -> Tensors:
        """Return the next state."""
        means = {name: mean.sum / mean.weight for name, mean in self.means.items()}
        pairs = zip(*self.method.split(means), *self.method.split(self.state), strict=True)
        gains = []
        for B, A, old_B, old_A in pairs:
            gain = ProductSum(len(B), A.shape[1])
            gain.add(B, A)
            gain.add(old_B, old_A, -1.0)
            gains.append(gain)
        scale, rank = self.method.settings.lora_scale, 2 * self.method.rank
        return self.state | self.method.add_products(self.state, gains, scale, rank)


METHOD = FRLora
