"""Fed-SB: one trained core between frozen bases, from a first round of full fine-tuning
(Singhal et al., 2025).

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
from ravan_flwr.methods.base import LocalWork, Method, Round, Settings, Tensors
from ravan_flwr.methods.means import Means
from ravan_flwr.methods.multihead import fingerprint_of_bases, load_bases, multiheads
from ravan_flwr.methods.tensors import check_names, check_tensor, flatten


class FedSB(Method):
    """The state and an upload are {"H"}, (layers, r, r)."""

    rank: int
    calibrates_everyone = False
    calibrates_by_steps = True

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        side = min(min(layer.out_features, layer.in_features) for layer in self.layers)
        self.rank = settings.rank or min(side, math.isqrt(self.budget // len(self.layers)))

    def trainable_parameters(self) -> int:
        return len(self.layers) * self.rank**2

    def upload_shapes(self, share: float) -> dict[str, tuple[int, ...]]:  # noqa: ARG002
        return {"H": (len(self.layers), self.rank, self.rank)}

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        # The real bases come from the first round; until then any do, since H is zero.
        B, A = make_bases(
            "normal", heads=1, rank=self.rank, out_features=layer.out_features,
            in_features=layer.in_features, seed=self.settings.seed, layer=layer.name,
        )  # fmt: skip
        device = linear.weight.device
        adapter = MultiHeadLinear(linear, B.to(device), A.to(device), self.settings.layer_form)
        adapter.s.requires_grad_(False)
        return adapter

    # The first round.

    def open_calibration(self, sums: Callable[[Tensors], Round] = Means) -> "FirstRound":
        return FirstRound(self.layers, self.rank, sums)

    def calibration_bytes(self) -> tuple[int, int]:
        matrices = sum(layer.out_features * layer.in_features for layer in self.layers)
        sides = sum(layer.out_features + layer.in_features for layer in self.layers)
        return 4 * matrices, 4 * self.rank * sides

    def calibrate(self, adapters: Sequence[nn.Module], work: LocalWork) -> Tensors:
        weights = [layer.base.weight for layer in multiheads(adapters)]
        before = [weight.detach().clone() for weight in weights]
        try:
            for layer, weight in zip(multiheads(adapters), weights, strict=True):
                layer.H.requires_grad_(False)
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

    def load_fixed(self, adapters: Sequence[nn.Module], fixed: Mapping[str, Tensor]) -> None:
        load_bases(adapters, fixed)

    # The rounds.

    def initial_state(self, adapters: Sequence[nn.Module]) -> Tensors:  # noqa: ARG002
        return {"H": torch.zeros(len(self.layers), self.rank, self.rank)}

    def load(self, adapters: Sequence[nn.Module], tensors: Mapping[str, Tensor]) -> None:
        shape = (len(self.layers), self.rank, self.rank)
        H = check_tensor(tensors, "H", shape, torch.float32)
        with torch.no_grad():
            for layer, layer_H in zip(multiheads(adapters), H, strict=True):
                layer.H.requires_grad_(True).copy_(layer_H[None])

    def upload(self, adapters: Sequence[nn.Module]) -> Tensors:
        return {"H": torch.cat([layer.H.detach() for layer in multiheads(adapters)]).cpu()}

    def lora_factors(self, adapter: nn.Module) -> tuple[Tensor, Tensor] | None:
        (layer,) = multiheads([adapter])
        with torch.no_grad():
            return layer.B[0] @ layer.H[0], layer.A[0]

    def fingerprint(self, adapters: Sequence[nn.Module]) -> list[float]:
        return fingerprint_of_bases(adapters)


METHOD = FedSB


class FirstRound:
    """The mean change of the adapted matrices, or another middle; what its decomposition gives."""

    def __init__(
        self, layers: Sequence[Layer], rank: int, sums: Callable[[Tensors], Round]
    ) -> None:
        self.layers, self.rank = layers, rank
        self.sizes = [layer.out_features * layer.in_features for layer in layers]
        self.sums = sums({"change": torch.zeros(sum(self.sizes))})

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """One client's change."""
        check_names(upload, ["change"])
        check_tensor(upload, "change", [sum(self.sizes)], torch.float32)
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        """The bases, and H(0)."""
        Bs, Hs, As = [], [], []
        mean = self.sums.close()["change"]
        for layer, flat in zip(self.layers, mean.split(self.sizes), strict=True):
            U, S, Vh = svd(flat.view(layer.out_features, layer.in_features).double())
            Bs.append(U[:, : self.rank])
            Hs.append(S[: self.rank].diag())
            As.append(Vh[: self.rank])
        return {"B": flatten(Bs), "A": flatten(As)}, {"H": torch.stack(Hs).float()}
