"""Train SLoRA: a LoRA that begins with what a sparse round found (Babakniya et al., 2023).

In round 0 the sampled clients fine-tune the adapted matrices themselves, each at the same few
places, drawn from the seed without regard to data, and send what changed there. The mean change
of a matrix, zero elsewhere, is decomposed, U S V^T, and a LoRA begins with

    scale B = U[:, :r] S[:r],    A = V^T[:r]

From then on it is FedIT (fedit.py), on the pretrained weights. There are as many places as the LoRA
has numbers, matrix by matrix, so that round 0 costs a client the bytes up of any other.

Of the paper only summaries, and code of others (FedLLM-Factory), were at hand. Its first stage has
several rounds, of a density that is set; here it is one round, as Fed-SB's.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer
from ravan_flwr.adapters.lora import svd
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.calibrated_bases import FirstRound, check_moved
from ravan_flwr.methods.extensions import LocalWork
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_names
from ravan_flwr.seeding import generator


class SLoRA(LoraMethod):
    """Keep the state {"B", "A"}; an upload has the same."""

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.calibration = SparseRound(self)


class SparseRound(FirstRound):
    """Fine-tune some numbers of the adapted matrices, on a sample of the clients."""

    def __init__(self, method: LoraMethod) -> None:
        super().__init__(method.settings, method.layers, 1, method.rank, ())
        self.method = method
        sides = [(layer.out_features, layer.in_features) for layer in method.layers]
        self.sizes = [min(method.rank * sum(pair), math.prod(pair)) for pair in sides]
        self.bytes_up, self.bytes_down = 4 * sum(self.sizes), 0

    def places(self) -> list[Tensor]:
        """Draw the places of each flat matrix at which clients train it, in ascending order."""
        places = []
        for layer, size in zip(self.layers, self.sizes, strict=True):
            random = generator(self.settings.seed, "sparse", layer.name)
            order = torch.randperm(layer.out_features * layer.in_features, generator=random)
            places.append(order[:size].sort().values)
        return places

    def run(self, adapters: Sequence[Any], work: LocalWork) -> Tensors:
        weights = [adapter.base.weight.requires_grad_(True) for adapter in adapters]
        hooks, places = [], self.places()
        for weight, chosen in zip(weights, places, strict=True):
            mask = torch.zeros(weight.numel(), dtype=torch.bool)
            mask[chosen] = True
            factor = mask.view_as(weight).to(weight.device)
            # Adam moves no number whose gradients are all zero.
            hooks.append(weight.register_hook(lambda gradient, factor=factor: gradient * factor))
        try:
            change = super().run(adapters, work)["change"].split([w.numel() for w in weights])
        finally:
            for hook in hooks:
                hook.remove()
        return {"change": torch.cat([c[chosen] for c, chosen in zip(change, places, strict=True)])}

    def load(self, adapters: Sequence[Any], fixed: Mapping[str, Tensor]) -> None:
        check_names(fixed, [])  # all that it makes is in the state

    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        check_moved(means)
        Bs, As, rank = [], [], self.rank
        for layer, mean, chosen in zip(self.layers, means, self.places(), strict=True):
            change = torch.zeros(layer.out_features * layer.in_features, dtype=torch.float64)
            change[chosen] = mean.double()
            U, S, Vh = svd(change.view(layer.out_features, layer.in_features))
            Bs.append(U[:, :rank] * S[:rank] / self.settings.lora_scale)
            As.append(Vh[:rank])
        return {}, self.method.pack(Bs, As)


METHOD = SLoRA
