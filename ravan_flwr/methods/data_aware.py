"""Make RAVAN's bases from the clients' data, in a calibration round (`init = data-aware`).

Every client sketches the gradients of some batches, without an update (adapters/sketch.py). From
the mean of the sketches the server has the leading singular vectors of the summed gradients: half
of the heads span them, the others their orthonormal complement. Then B and A travel, once to each
client.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.adapters.sketch import GradientSketch, Sketcher, fill_heads, watch_gradients
from ravan_flwr.methods.base import Settings, Sums, Tensors
from ravan_flwr.methods.calibration import Calibration, LocalWork
from ravan_flwr.methods.means import Means
from ravan_flwr.methods.multihead import load_bases
from ravan_flwr.methods.tensors import check_names, check_tensor
from ravan_flwr.seeding import generator


class DataAwareBases(Calibration[MultiHeadLinear]):
    """Sketch the gradients of every client."""

    def __init__(self, settings: Settings, layers: Sequence[Layer], heads: int, rank: int) -> None:
        self.settings, self.layers, self.heads, self.rank = settings, layers, heads, rank
        self.sketchers = [self._sketcher(layer) for layer in layers]

    def _sketcher(self, layer: Layer) -> Sketcher:
        """Give half of the heads, at least one, leading directions, as many as the layer holds."""
        fit = min(layer.out_features, layer.in_features) // self.rank
        leading = min(max(1, self.heads // 2), fit) * self.rank
        return Sketcher(layer, leading, self.settings.seed)

    @property
    def bytes_up(self) -> int:
        return 4 * sum(sketcher.size for sketcher in self.sketchers)

    @property
    def bytes_down(self) -> int:
        sides = sum(layer.out_features + layer.in_features for layer in self.layers)
        return 4 * self.heads * self.rank * sides

    def open(self, sums: Callable[[Tensors], Sums] = Means) -> "SketchedBases":
        return SketchedBases(self, sums)

    def run(self, adapters: Sequence[MultiHeadLinear], work: LocalWork) -> Tensors:
        sketches = [
            GradientSketch(sketcher, adapter.H.device)
            for sketcher, adapter in zip(self.sketchers, adapters, strict=True)
        ]
        with ExitStack() as stack:
            for adapter, sketch in zip(adapters, sketches, strict=True):
                stack.enter_context(watch_gradients(adapter, sketch.see))
            for _ in range(self.settings.calibration_steps):
                work.measure([tensor for sketch in sketches for tensor in (sketch.Y, sketch.Z)])
        flat = torch.cat([sketch.flat() for sketch in sketches])
        return {"sketch": flat / self.settings.calibration_steps}

    def load(self, adapters: Sequence[MultiHeadLinear], fixed: Mapping[str, Tensor]) -> None:
        load_bases(adapters, fixed)


class SketchedBases:
    """Sum up the clients' sketches, and make bases of their mean."""

    def __init__(self, calibration: DataAwareBases, sums: Callable[[Tensors], Sums]) -> None:
        self.calibration = calibration
        self.sizes = [sketcher.size for sketcher in calibration.sketchers]
        self.sums = sums({"sketch": torch.zeros(sum(self.sizes))})

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        check_names(upload, ["sketch"])
        check_tensor(upload, "sketch", [sum(self.sizes)], torch.float32)
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        heads, rank = self.calibration.heads, self.calibration.rank
        settings = self.calibration.settings
        Bs, As = [], []
        flats = self.sums.close()["sketch"].split(self.sizes)
        for sketcher, flat in zip(self.calibration.sketchers, flats, strict=True):
            random = generator(settings.seed, "complement", sketcher.layer.name)
            U, V = sketcher.subspaces(flat)
            Bs.append(fill_heads(U, heads, rank, random).flatten())
            As.append(fill_heads(V, heads, rank, random).mT.flatten())
        B, A = (settings.init_scale * torch.cat(parts) for parts in (Bs, As))
        return {"B": B.float(), "A": A.float()}, {}
