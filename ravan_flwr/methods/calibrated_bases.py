"""Compute bases from the clients' data in a calibration round; each client gets B and A once.

`data-aware` (RAVAN): every client sketches the gradients of some batches, without an update
(adapters/sketch.py). From the mean of the sketches the server computes the leading singular vectors
of the summed gradients. Half of the heads span them; the other heads span an orthonormal
complement.

`first-round` (RAVAN, and Fed-SB with one head): in round 0 of the record a sample of the clients
fine-tunes the adapted matrices themselves and sends their changes. The server decomposes the mean
change of each matrix, U S V^T. Head i of rank r starts with the i-th block of r singular vectors
and values:

    B_i = U_i,    A_i = V_i^T,    H_i(0) = S_i

So the h heads together start with the best approximation of rank r h to the mean change. A head
beyond the singular vectors of a matrix, or of a matrix without change, starts with H = 0. Its bases
are then random: orthonormal to the other heads while the matrix has room, else in a new orthonormal
block. If no matrix has changed, the round fails. Afterwards the matrices are the pretrained ones
again.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.adapters.lora import svd
from ravan_flwr.adapters.sketch import GradientSketch, Sketcher, fill_heads, watch_gradients
from ravan_flwr.methods.base import Settings, Tensors
from ravan_flwr.methods.extensions import Calibration, CalibrationLoop
from ravan_flwr.methods.tensors import check_names, check_tensor, flatten
from ravan_flwr.seeding import generator


class CalibratedBases(Calibration):
    """A calibration whose fixed tensors are the bases {"B", "A"}."""

    def __init__(
        self, settings: Settings, layers: Sequence[Layer], heads: int, rank: int, sizes: list[int]
    ) -> None:
        self.settings, self.layers, self.heads, self.rank = settings, layers, heads, rank
        self.sizes = sizes
        sides = sum(layer.out_features + layer.in_features for layer in layers)
        self.bytes_up, self.bytes_down = 4 * sum(sizes), 4 * heads * rank * sides

    def load(self, adapters: Sequence[MultiHeadLinear], fixed: Mapping[str, Tensor]) -> None:
        """Set the bases of every layer from the flat tensors {"B", "A"}, layer by layer."""
        check_names(fixed, ["B", "A"])
        parts = []
        for name, bases in (("B", [a.B for a in adapters]), ("A", [a.A for a in adapters])):
            sizes = [basis.numel() for basis in bases]
            flat = check_tensor(fixed, name, [sum(sizes)], torch.float32).split(sizes)
            parts.append([part.view(basis.shape) for part, basis in zip(flat, bases, strict=True)])
        for adapter, B, A in zip(adapters, *parts, strict=True):
            adapter.set_bases(B, A)


class DataAwareBases(CalibratedBases):
    """Bases from sketches of all clients' gradients."""

    name = "sketch"

    def __init__(self, settings: Settings, layers: Sequence[Layer], heads: int, rank: int) -> None:
        self.sketchers = []
        for layer in layers:
            # Half of the heads, at least one, take leading directions if the layer has room.
            fit = min(layer.out_features, layer.in_features) // rank
            leading = min(max(1, heads // 2), fit) * rank
            self.sketchers.append(Sketcher(layer, leading, settings.seed))
        sizes = [sketcher.size for sketcher in self.sketchers]
        super().__init__(settings, layers, heads, rank, sizes)

    def run(self, adapters: Sequence[MultiHeadLinear], loop: CalibrationLoop) -> Tensors:
        sketches = [
            GradientSketch(sketcher, adapter.H.device)
            for sketcher, adapter in zip(self.sketchers, adapters, strict=True)
        ]
        with ExitStack() as stack:
            for adapter, sketch in zip(adapters, sketches, strict=True):
                stack.enter_context(watch_gradients(adapter, sketch.add))
            for _ in range(self.settings.calibration_steps):
                loop.measure([tensor for sketch in sketches for tensor in (sketch.Y, sketch.Z)])
        flat = torch.cat([sketch.flat() for sketch in sketches])
        return {"sketch": flat / self.settings.calibration_steps}

    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        Bs, As = [], []
        for sketcher, flat in zip(self.sketchers, means, strict=True):
            random = generator(self.settings.seed, "complement", sketcher.layer.name)
            U, V = sketcher.subspaces(flat)
            Bs.append(fill_heads(U, self.heads, self.rank, random))
            As.append(fill_heads(V, self.heads, self.rank, random).mT)
        return {"B": flatten(Bs), "A": flatten(As)}, {}


def check_moved(changes: Sequence[Tensor]) -> None:
    """Raise ValueError if no adapted matrix has changed."""
    if not any(change.any() for change in changes):
        raise ValueError(
            "first round: got a mean change of zero in every adapted matrix, expected clients "
            "that move the pretrained weights; raise calibration-learning-rate or local-steps"
        )


class FirstRound(CalibratedBases):
    """Bases from the adapted matrices' mean change, after local steps of a sample of the clients.

    `shape` is that of H in the method's state.
    """

    name = "change"
    all_clients = False
    by_steps = True

    def __init__(
        self, settings: Settings, layers: Sequence[Layer], heads: int, rank: int,
        shape: Sequence[int],
    ) -> None:  # fmt: skip
        sizes = [layer.out_features * layer.in_features for layer in layers]
        super().__init__(settings, layers, heads, rank, sizes)
        self.shape = tuple(shape)

    def run(self, adapters: Sequence[Any], loop: CalibrationLoop) -> Tensors:
        weights = [adapter.base.weight for adapter in adapters]
        before = [weight.detach().clone() for weight in weights]
        try:
            for adapter, weight in zip(adapters, weights, strict=True):
                adapter.requires_grad_(False)
                weight.requires_grad_(True)
            loop.train(weights)
            changes = [
                weight.detach().float() - old.float()
                for weight, old in zip(weights, before, strict=True)
            ]
        finally:
            with torch.no_grad():
                for weight, old in zip(weights, before, strict=True):
                    weight.requires_grad_(False).copy_(old)
        return {"change": flatten(changes)}

    def make(self, means: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        check_moved(means)
        made = [self._decompose(*pair) for pair in zip(self.layers, means, strict=True)]
        Bs, Hs, As = zip(*made, strict=True)
        H = torch.stack(Hs).float().view(self.shape)
        return {"B": flatten(Bs), "A": flatten(As)}, {"H": H}

    def _decompose(self, layer: Layer, change: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return a layer's B (heads, out, r), H(0) (heads, r, r) and A (heads, r, in)."""
        heads, rank = self.heads, self.rank
        U, S, Vh = svd(change.view(layer.out_features, layer.in_features).double())
        leading = min(heads, len(S) // rank) * rank if S.any() else 0
        random = generator(self.settings.seed, "complement", layer.name)
        B = fill_heads(U[:, :leading], heads, rank, random)
        A = fill_heads(Vh[:leading].T, heads, rank, random).mT
        H = torch.zeros(heads, rank, rank, dtype=S.dtype)
        H[: leading // rank] = S[:leading].view(-1, rank).diag_embed()
        return B, H, A
