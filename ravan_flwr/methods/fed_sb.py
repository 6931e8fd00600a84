"""Train Fed-SB (Singhal et al., 2025): one core between bases that a first round finds.

    y = W x + b + B H A x

In a first federated round, round 0 of the record, the sampled clients fine-tune the adapted
matrices themselves and send how these changed. The mean change is decomposed, U S V^T, and

    B = U[:, :r],    H(0) = S[:r, :r],    A = V^T[:r]

B and A are frozen from then on, and travel to each client once; W is the pretrained one again.
Clients train H, and the server takes the mean, which is exact: B mean(H_c) A = mean(B H_c A).
It is RAVAN with one head and without a scale, up to the initialisation.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.adapters.lowrank import svd
from ravan_flwr.methods.base import Round, Settings, Tensors
from ravan_flwr.methods.calibration import Calibration, LocalWork
from ravan_flwr.methods.means import Means
from ravan_flwr.methods.multihead import MultiHeadMethod, load_bases
from ravan_flwr.methods.tensors import check_names, check_tensor, flatten


class FedSB(MultiHeadMethod):
    """Keep the state {"H"}, (layers, r, r); an upload has the same."""

    rank: int

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        side = min(min(layer.out_features, layer.in_features) for layer in self.layers)
        self.rank = settings.rank or min(side, math.isqrt(self.budget // len(self.layers)))
        self.calibration = FirstRound(self.layers, self.rank)

    def trainable_parameters(self) -> int:
        return len(self.layers) * self.rank**2

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"H": (len(self.layers), self.rank, self.rank)}

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        # The real bases come from the first round; until then any do, since H is zero.
        B, A = make_bases(
            "normal",
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


class FirstRound(Calibration[MultiHeadLinear]):
    """Fine-tune the adapted matrices themselves, on a sample of the clients."""

    everyone = False
    by_steps = True

    def __init__(self, layers: Sequence[Layer], rank: int) -> None:
        self.layers, self.rank = layers, rank

    @property
    def bytes_up(self) -> int:
        return 4 * sum(layer.out_features * layer.in_features for layer in self.layers)

    @property
    def bytes_down(self) -> int:
        sides = sum(layer.out_features + layer.in_features for layer in self.layers)
        return 4 * self.rank * sides

    def open(self, sums: Callable[[Tensors], Round] = Means) -> "DecomposedChange":
        return DecomposedChange(self.layers, self.rank, sums)

    def run(self, adapters: Sequence[MultiHeadLinear], work: LocalWork) -> Tensors:
        weights = [adapter.base.weight for adapter in adapters]
        before = [weight.detach().clone() for weight in weights]
        try:
            for adapter, weight in zip(adapters, weights, strict=True):
                adapter.H.requires_grad_(False)
                weight.requires_grad_(True)
            work.train(weights)
            changes = [
                weight.detach().float() - old.float()
                for weight, old in zip(weights, before, strict=True)
            ]
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, before, strict=True):
                    weight.requires_grad_(False).copy_(old)
        return {"change": flatten(changes)}

    def load(self, adapters: Sequence[MultiHeadLinear], fixed: Mapping[str, Tensor]) -> None:
        load_bases(adapters, fixed)


class DecomposedChange:
    """Sum up the clients' changes, and decompose their mean, or with `robust` their middle."""

    def __init__(
        self, layers: Sequence[Layer], rank: int, sums: Callable[[Tensors], Round]
    ) -> None:
        self.layers, self.rank = layers, rank
        self.sizes = [layer.out_features * layer.in_features for layer in layers]
        self.sums = sums({"change": torch.zeros(sum(self.sizes))})

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's change."""
        check_names(upload, ["change"])
        check_tensor(upload, "change", [sum(self.sizes)], torch.float32)
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        """Make the bases, and H(0)."""
        Bs, Hs, As = [], [], []
        mean = self.sums.close()["change"]
        for layer, flat in zip(self.layers, mean.split(self.sizes), strict=True):
            U, S, Vh = svd(flat.view(layer.out_features, layer.in_features).double())
            Bs.append(U[:, : self.rank])
            Hs.append(S[: self.rank].diag())
            As.append(Vh[: self.rank])
        return {"B": flatten(Bs), "A": flatten(As)}, {"H": torch.stack(Hs).float()}
