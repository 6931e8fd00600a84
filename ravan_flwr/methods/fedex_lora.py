"""Train FedEx-LoRA: FedIT, and what averaging B and A apart loses goes to W (Singhal et al., 2024).

    B <- mean_c B_c,    A <- mean_c A_c,    W <- W + scale (mean_c(B_c A_c) - mean(B) mean(A))

so that the aggregate's weight is exactly the mean of the clients'. The residual is
mean_c((B_c - mean B) (A_c - mean A)): with n clients of rank r, a product of rank (n - 1) r,
and it is summed up as such while replies come in.

A client may have missed any round, so the sum of all residuals so far is part of the state and
travels with every broadcast. Layer by layer it travels in the cheapest exact form: as two
factors while their rank k has k (out + in) < out in, and as the (out, in) matrix from then on.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.adapters.lowrank import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.co_moments import CoMoments
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_tensor, flatten


class FedExLora(LoraMethod):
    """Keep the state {"B", "A", "residual", "residual-rank"}; an upload is {"B", "A"}."""

    def adapt(self, layer: Layer, linear: nn.Linear) -> "ResidualLoRALinear":
        lora = super().adapt(layer, linear)
        return ResidualLoRALinear(linear, lora.B, lora.A, lora.scale)

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        nothing = {"residual": torch.zeros(0), "residual-rank": torch.zeros(1, dtype=torch.int32)}
        return super().initial_state(adapters) | nothing

    def broadcast_bytes(self, initial: Tensors, share: float) -> int:
        matrices = sum(layer.out_features * layer.in_features for layer in self.layers)
        return super().broadcast_bytes(initial, share) + 4 * matrices

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        for adapter, residual in zip(adapters, self.residuals(tensors), strict=True):
            assert isinstance(adapter, ResidualLoRALinear)  # `adapt` made it
            adapter.set_residual(residual.dense())

    def open_round(self, state: Tensors) -> "ExactMeans":
        return ExactMeans(self, state)

    def lora_factors(self, adapter: LoRALinear) -> None:  # noqa: ARG002 (W has changed)
        return None

    def residuals(self, tensors: Mapping[str, Tensor]) -> list["Residual"]:
        """Read what was added to each layer's weight so far."""
        rank = int(check_tensor(tensors, "residual-rank", (1,), torch.int32))
        sizes = [Residual.size(layer, rank) for layer in self.layers]
        flat = check_tensor(tensors, "residual", (sum(sizes),), torch.float32)
        return [
            Residual.read(layer, rank, part)
            for layer, part in zip(self.layers, flat.split(sizes), strict=True)
        ]


class Residual:
    """Keep what was added to one layer's weight: U (out, k) and V (k, in), or the matrix itself."""

    def __init__(self, layer: Layer, rank: int, parts: tuple[Tensor, ...]) -> None:
        self.layer, self.rank, self.parts = layer, rank, parts

    @staticmethod
    def size(layer: Layer, rank: int) -> int:
        """Count the numbers of the cheapest exact form."""
        out, inside = layer.out_features, layer.in_features
        return min(rank * (out + inside), out * inside)

    @classmethod
    def read(cls, layer: Layer, rank: int, flat: Tensor) -> "Residual":
        """Read what `flat` wrote."""
        out, inside = layer.out_features, layer.in_features
        if rank * (out + inside) < out * inside:
            U, V = flat.split([out * rank, rank * inside])
            return cls(layer, rank, (U.view(out, rank), V.view(rank, inside)))
        return cls(layer, rank, (flat.view(out, inside),))

    def flat(self) -> Tensor:
        """Write it as one tensor, for the state."""
        return flatten(self.parts)

    def dense(self) -> Tensor | None:
        """Make the (out, in) matrix; None where nothing was added."""
        if self.rank == 0:
            return None
        if len(self.parts) == 1:
            return self.parts[0]
        U, V = self.parts
        return U @ V

    def plus(self, moment: ProductSum, factor: float, rank: int) -> "Residual":
        """Add that many times the moment, which makes the rank of all of it `rank`."""
        if self.size(self.layer, rank) < self.layer.out_features * self.layer.in_features:
            U, V = self.parts
            B, A = moment.factors()
            return Residual(self.layer, rank, (torch.cat([U, factor * B], 1), torch.cat([V, A])))
        dense = self.dense()
        total = factor * moment.dense()
        return Residual(self.layer, rank, (total if dense is None else total + dense,))


class ExactMeans(CoMoments):
    """Take the means of B and A, and add what they lose to the residual."""

    def __init__(self, method: FedExLora, state: Tensors) -> None:
        super().__init__(method, state)
        self.method, self.state = method, state

    def close(self) -> Tensors:
        """Make the next state."""
        residuals = self.method.residuals(self.state)
        rank = int(self.state["residual-rank"]) + max(0, self.count - 1) * self.method.rank
        if self.count > 1:
            factor = self.method.settings.lora_scale / self.weight
            residuals = [
                residual.plus(moment, factor, rank)
                for residual, moment in zip(residuals, self.moments, strict=True)
            ]
        return {name: mean.close() for name, mean in self.means.items()} | {
            "residual": torch.cat([residual.flat() for residual in residuals]),
            "residual-rank": torch.tensor([rank], dtype=torch.int32),
        }


class ResidualLoRALinear(LoRALinear):
    """Add to a LoRA layer's pretrained weight, which can come back to the bit."""

    pretrained: Tensor

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float) -> None:
        super().__init__(base, B, A, scale)
        self.register_buffer("pretrained", base.weight.detach(), persistent=False)

    def set_residual(self, residual: Tensor | None) -> None:
        """Make the base's weight the pretrained one plus this."""
        weight = self.pretrained
        if residual is not None:
            weight = weight + residual.to(weight.device, weight.dtype)
        self.base.weight.data = weight

    def delta_weight(self) -> Tensor:
        """Compute scale B A and the residual, (out, in)."""
        return super().delta_weight() + (self.base.weight - self.pretrained)


METHOD = FedExLora
