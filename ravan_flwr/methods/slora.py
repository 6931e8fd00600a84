"""Train SLoRA: a LoRA initialised by a sparse first round (Babakniya et al., 2023).

In round 0 the sampled clients fine-tune the adapted matrices themselves, at a few entries, and send
the change of these. The entries are the same for all clients, and drawn from the seed independently
of the data. The server decomposes the mean change of each matrix, which is zero elsewhere, as
U S V^T, and the LoRA starts with

    scale B = U[:, :r] S[:r],    A = V^T[:r]

The later rounds are FedIT (fedit.py) on the pretrained weights. A matrix has as many trained
entries as its LoRA has parameters. So the upload of round 0 has as many bytes as that of any other
round.

Only summaries of the paper, and the code of others (FedLLM-Factory), were available. The paper's
first stage has several rounds, and its density is a setting; here it is one round, as in Fed-SB.
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
from ravan_flwr.methods.extensions import CalibrationLoop
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_names
from ravan_flwr.seeding import generator


class SLoRA(LoraMethod):
    """State and upload: {"B", "A"}."""

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.calibration = SparseRound(self)


class SparseRound(FirstRound):
    """The first round: local steps on some entries of the adapted matrices."""

    def __init__(self, method: LoraMethod) -> None:
        super().__init__(method.settings, method.layers, 1, method.rank, ())
        self.method = method
        sides = [(layer.out_features, layer.in_features) for layer in method.layers]
        self.sizes = [min(method.rank * sum(pair), math.prod(pair)) for pair in sides]
        self.bytes_up, self.bytes_down = 4 * sum(self.sizes), 0

    def positions(self) -> list[Tensor]:
        """Draw the positions of each flat matrix's trained entries, in ascending order."""
        positions = []
        for layer, size in zip(self.layers, self.sizes, strict=True):
            random = generator(self.settings.seed, "sparse", layer.name)
            order = torch.randperm(layer.out_features * layer.in_features, generator=random)
            positions.append(order[:size].sort().values)
        return positions

    def run(self, adapters: Sequence[Any], loop: CalibrationLoop) -> Tensors:
        weights = [adapter.base.weight.requires_grad_(True) for adapter in adapters]
        hooks, positions = [], self.positions()
        for adapter, weight, chosen in zip(adapters, weights, positions, strict=True):
            mask = torch.zeros(weight.numel(), dtype=torch.bool)
            mask[chosen] = True
            trained, old = mask.view_as(weight).to(weight.device), weight.detach().clone()

            def mask_gradient(gradient: Tensor, trained: Tensor = trained) -> Tensor:
                return gradient * trained

            # Adam does not change a number whose gradients are all zero, except by weight decay.
            def undo_decay(base: Any, _: Any, trained: Tensor = trained, old: Tensor = old) -> None:
                base.weight.data.copy_(torch.where(trained, base.weight.data, old))

            hooks += [
                weight.register_hook(mask_gradient),
                adapter.base.register_forward_pre_hook(undo_decay),
            ]
        try:
            change = super().run(adapters, loop)["change"].split([w.numel() for w in weights])
        finally:
            for hook in hooks:
                hook.remove()
        return {
            "change": torch.cat([c[chosen] for c, chosen in zip(change, positions, strict=True)])
        }

    def load(self, adapters: Sequence[Any], fixed: Mapping[str, Tensor]) -> None:
        check_names(fixed, [])  # the results are all in the state

    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        check_moved(means)
        Bs, As, rank = [], [], self.rank
        for layer, mean, chosen in zip(self.layers, means, self.positions(), strict=True):
            change = torch.zeros(layer.out_features * layer.in_features, dtype=torch.float64)
            change[chosen] = mean.double()
            U, S, Vh = svd(change.view(layer.out_features, layer.in_features))
            Bs.append(U[:, :rank] * S[:rank] / self.settings.lora_scale)
            As.append(Vh[:rank])
        return {}, self.method.pack(Bs, As)


METHOD = SLoRA
