"""Add products of clients' factors to the pretrained weight, and send all that was added.

A client may have missed any round, so the sum of all that was added so far, the residual, is part
of the state and travels with every broadcast. Layer by layer it travels in the cheapest exact
form: as two factors while their rank k has k (out + in) < out in, and as the (out, in) matrix from
then on.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.adapters.lowrank import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_tensor, flatten


class ResidualLora(LoraMethod):
    """Keep {"residual", "residual-rank"} in the state, and add it to the pretrained weights."""

    def adapt(self, layer: Layer, linear: nn.Linear) -> "ResidualLoRALinear":
        lora = super().adapt(layer, linear)
        return ResidualLoRALinear(linear, lora.B, lora.A, lora.scale)

    def no_residual(self) -> Tensors:
        """Make the part of the state that says what was added: nothing yet."""
        return {"residual": torch.zeros(0), "residual-rank": torch.zeros(1, dtype=torch.int32)}

    def broadcast_bytes(self, initial: Tensors, share: float) -> int:
        matrices = sum(layer.out_features * layer.in_features for layer in self.layers)
        return super().broadcast_bytes(initial, share) + 4 * matrices

    def load_residual(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        """Make every layer's weight the pretrained one plus the residual."""
        for adapter, residual in zip(adapters, self.residuals(tensors), strict=True):
            assert isinstance(adapter, ResidualLoRALinear)  # `adapt` made it
            adapter.set_residual(residual.dense())

    def lora_factors(self, adapter: LoRALinear) -> None:
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

    def add_products(
        self, state: Tensors, products: Sequence[ProductSum], factor: float, rank: int
    ) -> Tensors:
        """Add that many times the products, of `rank` in all, to the state's residual."""
        rank += int(state["residual-rank"])
        added = [
            residual.plus(product, factor, rank).flat()
            for residual, product in zip(self.residuals(state), products, strict=True)
        ]
        return {
            "residual": torch.cat(added),
            "residual-rank": torch.tensor([rank], dtype=torch.int32),
        }


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
