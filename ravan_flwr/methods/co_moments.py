"""Sum up what averaging B and A apart loses: mean(B A) - mean(B) mean(A), layer by layer.

It is mean_c((B_c - mean B) (A_c - mean A)). The co-moment sum_c w_c (B_c - mean B) (A_c - mean A)
grows by one product of rank r for each reply but the first, as Welford's variance does.
"""

from collections.abc import Mapping

from torch import Tensor

from ravan_flwr.adapters.lowrank import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.means import Mean


class CoMoments:
    """Keep the means of B and A, and per layer the co-moment of B and A about them."""

    def __init__(self, method: LoraMethod, state: Tensors) -> None:
        self.split = method.split
        self.means = {name: Mean(state[name]) for name in ("B", "A")}
        self.moments = [
            ProductSum(layer.out_features, layer.in_features) for layer in method.layers
        ]
        self.count = 0

    @property
    def weight(self) -> float:
        """Return the weight of all replies."""
        return self.means["B"].weight

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A."""
        if self.count:
            before = self.weight
            apart = {k: upload[k].double() - m.sum / before for k, m in self.means.items()}
            factor = weight * before / (before + weight)
            for moment, B, A in zip(self.moments, *self.split(apart), strict=True):
                moment.add(B, A, factor)
        for name, mean in self.means.items():
            mean.add(upload[name], weight)
        self.count += 1
