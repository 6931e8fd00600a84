"""Train FedEx-LoRA: FedIT, with the error of its averages added to W (Singhal et al., 2024).

    B <- mean_c B_c,    A <- mean_c A_c,    W <- W + scale (mean_c(B_c A_c) - mean(B) mean(A))

So the weight of the aggregate is exactly the mean of the clients' weights. The added residual is
mean_c((B_c - mean B) (A_c - mean A)). With n clients of rank r its rank is at most (n - 1) r, and
the server accumulates it in factored form as uploads arrive (`CoMoments`). With one client a round
the residual is zero, and FedEx-LoRA is FedIT.
"""

import math
from collections.abc import Mapping, Sequence

from torch import Tensor

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.adapters.lora import product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import CoMoments, ResidualLora


class FedExLora(NormLimits, ResidualLora):
    """State: {"B", "A", "residual", "residual-rank"}; upload: {"B", "A"}."""

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return super().initial_state(adapters) | self.empty_residual()

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        self.load_residual(adapters, tensors)

    def open_round(self, state: Tensors) -> "ExactMeans":
        return ExactMeans(self, state)

    def norms_if_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        # The product of the changes of B and A may have the root mean square that B's change may.
        factors = zip(*self.split(upload), *self.split(start), strict=True)
        lost = math.hypot(*(product_norm(B - old_B, A - old_A) for B, A, old_B, old_A in factors))
        numbers = sum(layer.out_features * layer.in_features for layer in self.layers)
        return {"B": self.settings.lora_scale * lost * math.sqrt(len(upload["B"]) / numbers)}

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {"residual": math.inf}  # `norms_if_alone` limits each upload's part in it


class ExactMeans(CoMoments):
    """The means of B and A; their error is added to the residual."""

    method: FedExLora

    def close(self) -> Tensors:
        """Return the next state."""
        means = {name: mean.close() for name, mean in self.means.items()}
        if self.count < 2:  # the product of the means is exact
            return self.state | means
        factor = self.method.settings.lora_scale / self.weight
        rank = (self.count - 1) * self.method.rank
        return means | self.method.add_products(self.state, self.sums, factor, rank)


METHOD = FedExLora
