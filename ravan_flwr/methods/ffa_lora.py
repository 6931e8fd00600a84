"""Train FFA-LoRA: LoRA with A frozen (Sun et al., 2024).

A is drawn from the seed on both sides and never travels; clients train B and the server takes
the mean, which is exact: mean(B_c) A = mean(B_c A). At one number of parameters its rank is
twice that of the other LoRA methods, where matrices are square.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import SumsChanges
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import flatten


class FFALora(SumsChanges, LoraMethod):
    """Keep the state {"B"}; an upload has the same."""

    def shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        return {"B": super().shapes(rank)["B"]}

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return {"B": super().initial_state(adapters)["B"]}

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, {**tensors, "A": flatten(self.drawn_A)})
        for adapter in adapters:
            adapter.A.requires_grad_(False)


METHOD = FFALora
