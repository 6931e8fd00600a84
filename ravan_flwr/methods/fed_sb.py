"""Train Fed-SB (Singhal et al., 2025): one core between bases that a first round finds.

    y = W x + b + B H A x

In a first federated round, as the RAVAN paper describes it, the sampled clients fine-tune the
adapted matrices themselves (first_round.py). Their mean change is decomposed, U S V^T, and

    B = U[:, :r],    H(0) = S[:r, :r],    A = V^T[:r]

B and A are frozen from then on, and travel to each client once; W is the pretrained one again.
Clients train H, and the server takes the mean, which is exact: B mean(H_c) A = mean(B H_c A).
It is RAVAN with one head and without a scale, up to the initialisation.

Fed-SB's own code has no such round: the server decomposes one signed gradient, -eta sign(sum of
gradients), of about 50 examples.
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.first_round import FirstRound
from ravan_flwr.methods.multihead import MultiHeadMethod
from ravan_flwr.methods.tensors import check_tensor


class FedSB(MultiHeadMethod):
    """Keep the state {"H"}, (layers, r, r); an upload has the same."""

    rank: int

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        side = min(min(layer.out_features, layer.in_features) for layer in self.layers)
        self.rank = settings.rank or min(side, math.isqrt(self.budget // len(self.layers)))
        shape = (len(self.layers), self.rank, self.rank)
        self.calibration = FirstRound(self.layers, 1, self.rank, shape, seed=settings.seed)

    def trainable_parameters(self) -> int:
        return len(self.layers) * self.rank**2

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"H": (len(self.layers), self.rank, self.rank)}

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        # The real bases come from the first round; until then any do, since H is zero.
        B, A = make_bases(
            self.init,
            heads=1,
            rank=self.rank,
            out_features=layer.out_features,
            in_features=layer.in_features,
            seed=self.settings.seed,
            layer=layer.name,
        )
        device = linear.weight.device
        adapter = MultiHeadLinear(linear, B.to(device), A.to(device), self.settings.layer_form)
        adapter.s.requires_grad_(False)
        return adapter

    def initial_state(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:  # noqa: ARG002
        return {"H": torch.zeros(len(self.layers), self.rank, self.rank)}

    def load(self, adapters: Sequence[MultiHeadLinear], tensors: Mapping[str, Tensor]) -> None:
        shape = (len(self.layers), self.rank, self.rank)
        H = check_tensor(tensors, "H", shape, torch.float32)
        with torch.no_grad():
            for adapter, layer_H in zip(adapters, H, strict=True):
                adapter.H.requires_grad_(True).copy_(layer_H[None])

    def upload(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return {"H": torch.cat([adapter.H.detach() for adapter in adapters]).cpu()}

    def lora_factors(self, adapter: MultiHeadLinear) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            return adapter.B[0] @ adapter.H[0], adapter.A[0]


METHOD = FedSB
