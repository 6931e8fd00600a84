"""Train RoLoRA: B and A in turn, a round each (Chen et al., 2025).

    odd rounds     B <- mean_c B_c,    A as it is
    even rounds    A <- mean_c A_c,    B as it is

Clients train one of the two and send it; with the other alike for all, the mean is exact in every
round, mean(B_c) A = mean(B_c A), and both are learned. B comes first: while it is zero, A has no
gradient. A client may have missed any round, so it is sent both.
"""

from collections.abc import Callable, Sequence

import torch

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.lora import LoraMethod


class RoLora(LoraMethod):
    """Keep the state {"B", "A"}; an upload is {"B"} or {"A"}."""

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
