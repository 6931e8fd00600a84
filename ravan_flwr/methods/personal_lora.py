"""Share what LoRA methods have in common of which B or A stays with each client.

What does not travel is the client's own part. It begins as every LoRA does, B = 0 and A drawn
from the seed, so that all clients begin alike.
"""

from collections.abc import Mapping, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor

from ravan_flwr.adapters import Layer, LoRALinear
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.personal import Personal

Value = TypeVar("Value")


class PersonalLora(LoraMethod):
    """Send the factors of `travels`; the others stay."""

    travels: ClassVar[tuple[str, ...]]

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.personal = _OwnFactors(self)

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:
        return self._travelling(super().upload_shapes(share))

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self._travelling(super().initial_state(adapters))

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        begun = super().initial_state(adapters)
        stays = {name: tensor for name, tensor in begun.items() if name not in self.travels}
        super().load(adapters, {**tensors, **stays})

    def upload(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self._travelling(super().upload(adapters))

    def factors_of(self, adapters: Sequence[LoRALinear]) -> Tensors:
        """Copy both factors, what travels and what stays."""
        return super().upload(adapters)

    def set_factors(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        """Put both factors into the adapters."""
        super().load(adapters, tensors)

    def _travelling(self, factors: Mapping[str, Value]) -> dict[str, Value]:
        return {name: value for name, value in factors.items() if name in self.travels}


class _OwnFactors(Personal[LoRALinear]):
    """Hold the factors of a method that do not travel."""

    def __init__(self, method: PersonalLora) -> None:
        self._method = method

    def shapes(self) -> dict[str, tuple[int, ...]]:
        shapes = self._method.shapes(self._method.rank)
        return {name: shape for name, shape in shapes.items() if name not in self._method.travels}

    def collect(self, adapters: Sequence[LoRALinear]) -> Tensors:
        factors = self._method.factors_of(adapters)
        return {name: factors[name] for name in self.shapes()}

    def put(self, adapters: Sequence[LoRALinear], own: Mapping[str, Tensor]) -> None:
        self._method.set_factors(adapters, self._method.factors_of(adapters) | dict(own))
