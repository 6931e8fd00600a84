"""Share what methods whose adapters are multi-head layers have in common."""

from collections.abc import Sequence

import torch
from torch import nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.methods.tensors import probe


class MultiHeadMethod(Method[MultiHeadLinear]):
    """Adapt every layer by cores between frozen bases, which both sides make from the seed."""

    rank: int
    heads = 1
    init = "normal"  # how the bases are made
    trains_scales = False

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.side = min(min(layer.out_features, layer.in_features) for layer in self.layers)

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        out, inside = layer.out_features, layer.in_features
        if linear.weight.is_meta:  # a plan needs shapes only
            B = torch.empty(self.heads, out, self.rank, device="meta")
            A = torch.empty(self.heads, self.rank, inside, device="meta")
        else:
            B, A = make_bases(
                self.init, heads=self.heads, rank=self.rank, out_features=out, in_features=inside,
                seed=self.settings.seed, layer=layer.name,
            )  # fmt: skip
        return MultiHeadLinear(linear, B, A, self.settings.layer_form)

    def fingerprint(self, adapters: Sequence[MultiHeadLinear]) -> list[float]:
        return probe([(adapter.B, adapter.A) for adapter in adapters])
