"""Train RoLoRA: B and A in alternating rounds (Chen et al., 2025).

    odd rounds     B <- mean_c B_c,    A fixed
    even rounds    A <- mean_c A_c,    B fixed

Clients train one of the two factors and send it. The other factor is the same for all, so the mean
is exact in every round, mean(B_c) A = mean(B_c A), although both factors are learned. B is trained
first: while it is zero, A has no gradient. A client may have missed any round, so the server sends
both.
"""

from collections.abc import Callable, Sequence

import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.lora import LoraMethod


class RoLora(LoraMethod):
    """State: {"B", "A"}; upload: {"B"} in odd rounds, {"A"} in even ones."""

    sent, frozen_tensors = ("B",), ("A",)
    rounds = (
        {"sent": ("B",), "frozen_tensors": ("A",)},
        {"sent": ("A",), "frozen_tensors": ("B",)},
    )

    def choose(
        self, adapters: Sequence[LoRALinear], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        for name in self.frozen_tensors:
            for adapter in adapters:
                adapter.get_parameter(name).requires_grad_(False)


METHOD = RoLora
