"""Make bases, and the first H, from a round in which clients train the matrices themselves.

In round 0 of the record a sample of the clients fine-tunes the adapted matrices and sends how
these changed. The mean change of each is decomposed, U S V^T, and head i of rank r gets the i-th
block of r singular directions and values:

    B_i = c U_i,    A_i = c V_i^T,    H_i(0) = S_i / c^2

with c = `init-scale`. So all heads together begin with the best approximation of the mean change
of their whole rank. Where a matrix has no further directions, or has not changed, heads begin as
orthonormal blocks in general position to these, with H = 0. If no matrix has changed, the round is
refused: there is nothing to make bases of. B and A are frozen from then on, and travel to each
client once; the matrices are the pretrained ones again. Fed-SB is this with one head
(fed_sb.py), RAVAN takes it with `init = first-round`.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.adapters.lowrank import svd
from ravan_flwr.adapters.sketch import fill_heads
from ravan_flwr.methods.base import Sums, Tensors
from ravan_flwr.methods.calibration import Calibration, LocalWork
from ravan_flwr.methods.means import Means
from ravan_flwr.methods.multihead import load_bases
from ravan_flwr.methods.tensors import check_names, check_tensor, flatten
from ravan_flwr.seeding import generator


class FirstRound(Calibration[MultiHeadLinear]):
    """Fine-tune the adapted matrices themselves, on a sample of the clients.

    `shape` is that of H in the method's state.
    """

    everyone = False
    by_steps = True

    def __init__(
        self,
        layers: Sequence[Layer],
        heads: int,
        rank: int,
        shape: Sequence[int],
        *,
        seed: int,
        scale: float = 1.0,
    ) -> None:
        self.layers, self.heads, self.rank, self.shape = layers, heads, rank, tuple(shape)
        self.seed, self.scale = seed, scale

    @property
    def bytes_up(self) -> int:
        return 4 * sum(layer.out_features * layer.in_features for layer in self.layers)

    @property
    def bytes_down(self) -> int:
        sides = sum(layer.out_features + layer.in_features for layer in self.layers)
        return 4 * self.heads * self.rank * sides

    def open(self, sums: Callable[[Tensors], Sums] = Means) -> "DecomposedChange":
        return DecomposedChange(self, sums)

    def run(self, adapters: Sequence[MultiHeadLinear], work: LocalWork) -> Tensors:
        weights = [adapter.base.weight for adapter in adapters]
        before = [weight.detach().clone() for weight in weights]
        try:
            for adapter, weight in zip(adapters, weights, strict=True):
                adapter.H.requires_grad_(False)
                adapter.s.requires_grad_(False)
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

    def decompose(self, layer: Layer, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Make a layer's B (heads, out, r), H(0) (heads, r, r) and A (heads, r, in)."""
        heads, rank = self.heads, self.rank
        U, S, Vh = svd(change.view(layer.out_features, layer.in_features).double())
        leading = min(heads, len(S) // rank) * rank if S.any() else 0
        random = generator(self.seed, "complement", layer.name)
        B = fill_heads(U[:, :leading], heads, rank, random)
        A = fill_heads(Vh[:leading].T, heads, rank, random).mT
        H = torch.zeros(heads, rank, rank, dtype=S.dtype)
        H[: leading // rank] = S[:leading].view(-1, rank).diag_embed()
        return self.scale * B, H / self.scale**2, self.scale * A


class DecomposedChange:
    """Sum up the clients' changes, and decompose their mean, or with `robust` their middle."""

    def __init__(self, calibration: FirstRound, sums: Callable[[Tensors], Sums]) -> None:
        self.calibration, self.layers = calibration, calibration.layers
        self.sizes = [layer.out_features * layer.in_features for layer in self.layers]
        self.sums = sums({"change": torch.zeros(sum(self.sizes))})

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's change."""
        check_names(upload, ["change"])
        check_tensor(upload, "change", [sum(self.sizes)], torch.float32)
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        """Make the bases, and H(0)."""
        change = self.sums.close()["change"]
        if not change.any():
            raise ValueError(
                "first round: got a mean change of zero in every adapted matrix, expected clients "
                "that move the pretrained weights; raise calibration-learning-rate or local-steps"
            )
        parts = change.split(self.sizes)
        made = [
            self.calibration.decompose(layer, change)
            for layer, change in zip(self.layers, parts, strict=True)
        ]
        Bs, Hs, As = zip(*made, strict=True)
        H = torch.stack(Hs).float().view(self.calibration.shape)
        return {"B": flatten(Bs), "A": flatten(As)}, {"H": H}
