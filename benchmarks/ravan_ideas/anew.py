"""RAVAN with new bases after half of ten rounds; the earlier update is kept exactly.

Each layer has twice the heads: the first half trains in the first rounds, the second, between
bases of another seed and from H = 0, in the others. A client trains and uploads as much as with
RAVAN; the broadcast has both halves, which an option of the package would not need.
"""

import copy
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.methods.base import Settings
from ravan_flwr.methods.ravan import Ravan

ROUNDS = 5  # with one set of bases


class SpawnStarter(Ravan):
    """Keep the state {"H"} of both halves; an upload has the heads of one."""

    turn = 0

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.each = self.heads  # heads of each half
        self.heads = self.parts = 2 * self.each

    def in_round(self, number: int) -> "SpawnStarter":
        method = copy.copy(self)
        method.turn = min(1, (number - 1) // ROUNDS)
        return method

    def trainable_parameters(self) -> int:
        return super().trainable_parameters() // 2

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"H": (len(self.layers) * self.each, self.rank, self.rank)}

    def check(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        """Check nothing: all clients of the study are trusted."""

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        if linear.weight.is_meta:
            return super().adapt(layer, linear)
        halves = [
            make_bases(
                self.init, heads=self.each, rank=self.rank, out_features=layer.out_features,
                in_features=layer.in_features, seed=self.settings.seed, layer=layer.name + again,
            )
            for again in ("", " anew")
        ]  # fmt: skip
        B, A = (torch.cat(both) for both in zip(*halves, strict=True))
        return MultiHeadLinear(linear, B, A, self.settings.layer_form)

    def choose(
        self,
        adapters: Sequence[MultiHeadLinear],
        fraction: float,  # noqa: ARG002
        random: torch.Generator,  # noqa: ARG002
        backward: Callable[[], object],  # noqa: ARG002
    ) -> None:
        first = self.turn * self.each
        for adapter in adapters:
            adapter.train_heads(list(range(first, first + self.each)))


METHOD = SpawnStarter
