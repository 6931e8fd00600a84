"""Train FSLoRA: random sketches of one LoRA for devices of unequal budgets (Fang et al., 2025).

The server keeps B (out, r) and A (r, in). In each round, client c draws a sketch S_c, a diagonal
matrix in which r_c = floor(fraction * r) of the r entries, at least one, are r / r_c and the others
are zero. So the mean of S_c over the draws is the identity. The client trains

    y = W x + b + scale B S_c A x

in which only r_c columns of B and rows of A have a gradient, and sends these. The mean of the
changes is over all clients of the round. A client that did not draw a column counts as zero in it:

    B <- B + mean_c(B_c - B),    A <- A + mean_c(A_c - A)

Both factors are averaged, so the method is not exact. With whole budgets it is FedIT (fedit.py).
Fed-PLoRA (fed_plora.py) has the same uploads, but keeps the other ranks in the forward pass and
averages a rank over those that trained it.

An upload is {"B", "A"} of the drawn ranks, and {"modules": packed bits}, which marks them. The draw
is the same in all layers. In the paper the server draws it; here the client does, from the seed,
the round and its id.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.fed_plora import FedPLora, ModuleMeans, ParallelLoRALinear


class SketchedLoRALinear(ParallelLoRALinear):
    """A LoRA layer of which the drawn ranks are trained, and the others are left out."""

    def freeze_all_but(self, chosen: Tensor) -> None:
        """Train only the drawn ranks, scaled up for those that the sketch leaves out."""
        super().freeze_all_but(chosen)
        self.frozen_columns = self.frozen_rows = None
        self.scale *= len(chosen) / int(chosen.sum())


class FSLora(FedPLora):
    """State: {"B", "A"}; upload: {"B", "A", "modules"}."""

    layer_class = SketchedLoRALinear

    def load(self, adapters: Sequence[Any], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        for adapter in adapters:
            adapter.scale = self.settings.lora_scale

    def open_round(self, state: Tensors) -> "SketchedMeans":
        return SketchedMeans(self, state)


class SketchedMeans(ModuleMeans):
    """The means over all clients; where a client did not train, it counts with the old value."""

    def __init__(self, method: FSLora, state: Tensors) -> None:
        super().__init__(method, state)
        self.total = 0.0

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's ranks."""
        super().add(upload, weight)
        self.total += weight

    def close(self) -> Tensors:
        """Return the next state."""
        untrained = {name: self.total - weight for name, weight in self.weights.items()}
        return {
            name: ((self.sums[name] + untrained[name] * old) / self.total).float()
            for name, old in self.state.items()
        }


METHOD = FSLora
