"""Train Fed-SB (Singhal et al., 2025): one core between bases that result from a first round.

    y = W x + b + B H A x

In the first round, as the RAVAN paper describes it, the sampled clients fine-tune the adapted
matrices themselves (calibrated_bases.py). The server decomposes their mean change, U S V^T, and

    B = U[:, :r],    H(0) = S[:r, :r],    A = V^T[:r]

Then B and A are frozen and travel to each client once; W is the pretrained weight again. In later
rounds clients train H, and the server takes the mean. It is exact: B mean(H_c) A = mean(B H_c A).
Fed-SB is RAVAN with one head and without a scale, up to the initialisation.

Fed-SB's own code has no such round: the server decomposes one signed gradient, -eta sign(sum of
gradients), of about 50 examples.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.methods.base import Settings, Tensors, check_rank
from ravan_flwr.methods.calibrated_bases import FirstRound
from ravan_flwr.methods.multihead import MultiHeadMethod
from ravan_flwr.methods.tensors import check_tensor


class FedSB(MultiHeadMethod):
    """State and upload: {"H"}, (layers, r, r)."""

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.rank = settings.rank or min(self.side, math.isqrt(self.budget // len(self.layers)))
        check_rank(self.rank, self.side)
        self.shape = (len(self.layers), self.rank, self.rank)
        # The first round computes the bases. Until then any bases do, since H is zero.
        self.calibration = FirstRound(settings, self.layers, 1, self.rank, self.shape)

    def trainable_parameters(self) -> int:
        return len(self.layers) * self.rank**2

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        return {"H": self.shape}

    def initial_state(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return {"H": torch.zeros(self.shape)}

    def load(self, adapters: Sequence[MultiHeadLinear], tensors: Mapping[str, Tensor]) -> None:
        H = check_tensor(tensors, "H", self.shape, torch.float32)
        with torch.no_grad():
            for adapter, layer_H in zip(adapters, H, strict=True):
                adapter.s.requires_grad_(False)
                adapter.H.requires_grad_(True).copy_(layer_H[None])

    def upload(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return {"H": torch.cat([adapter.H.detach() for adapter in adapters]).cpu()}


METHOD = FedSB
