"""Train RoLoRA: B and A in turn, a round each (Chen et al., 2025).

    odd rounds     B <- mean_c B_c,    A as it is
    even rounds    A <- mean_c A_c,    B as it is

Clients train one of the two and send it; with the other alike for all, the mean is exact in every
round, mean(B_c) A = mean(B_c A), and both are learned. B comes first: while it is zero, A has no
gradient. A client may have missed any round, so it is sent both.
"""

import copy
from collections.abc import Callable, Sequence

import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import flatten


class RoLora(LoraMethod):
    """Keep the state {"B", "A"}; an upload is {"B"} or {"A"}."""

    turn, frozen_tensors = "B", ("A",)
    period = 2

    def in_round(self, number: int) -> "RoLora":
        method = copy.copy(self)
        method.turn, method.frozen_tensors = ("B", ("A",)) if number % 2 else ("A", ("B",))
        return method

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:
        return {self.turn: super().upload_shapes(share)[self.turn]}

    def choose(
        self, adapters: Sequence[LoRALinear], share: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        for adapter in adapters:
            (adapter.A if self.turn == "B" else adapter.B).requires_grad_(False)

    def upload(self, adapters: Sequence[LoRALinear]) -> Tensors:
        factors = [adapter.B if self.turn == "B" else adapter.A for adapter in adapters]
        return {self.turn: flatten(factors)}


METHOD = RoLora
