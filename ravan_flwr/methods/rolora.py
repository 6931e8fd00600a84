"""Train RoLoRA: B and A in turn, a round each (Chen et al., 2025).

    odd rounds     B <- mean_c B_c,    A as it is
    even rounds    A <- mean_c A_c,    B as it is

Clients train one of the two and send it; with the other alike for all, the mean is exact in every
round, mean(B_c) A = mean(B_c A), and both are learned. B comes first: while it is zero, A has no
gradient. A client may have missed any round, so it is sent both.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.means import Means
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

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        return {
            name: torch.full_like(state[name], torch.nan) for name in self.frozen_tensors
        } | dict(upload)

    def open_round(self, state: Tensors) -> "MeanOfOne":
        return MeanOfOne(state, self.turn)

    def choose(
        self,
        adapters: Sequence[LoRALinear],
        share: float,  # noqa: ARG002
        random: torch.Generator,  # noqa: ARG002
        backward: Callable[..., object],  # noqa: ARG002
    ) -> None:
        for adapter in adapters:
            (adapter.A if self.turn == "B" else adapter.B).requires_grad_(False)

    def upload(self, adapters: Sequence[LoRALinear]) -> Tensors:
        factors = [adapter.B if self.turn == "B" else adapter.A for adapter in adapters]
        return {self.turn: flatten(factors)}


class MeanOfOne(Means):
    """Keep the mean of one tensor of the state."""

    def __init__(self, state: Tensors, name: str) -> None:
        super().__init__({name: state[name]})
        self.state = state

    def close(self) -> Tensors:
        """Make the next state."""
        return self.state | super().close()


METHOD = RoLora
