"""Train FedEx-LoRA: FedIT, and what averaging B and A apart loses goes to W (Singhal et al., 2024).

    B <- mean_c B_c,    A <- mean_c A_c,    W <- W + scale (mean_c(B_c A_c) - mean(B) mean(A))

so that the aggregate's weight is exactly the mean of the clients'. The residual is
mean_c((B_c - mean B) (A_c - mean A)): with n clients of rank r, a product of rank (n - 1) r,
and it is summed up as such while replies come in.
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
    """Keep the state {"B", "A", "residual", "residual-rank"}; an upload is {"B", "A"}."""

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return super().initial_state(adapters) | self.no_residual()

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        super().load(adapters, tensors)
        self.load_residual(adapters, tensors)

    def open_round(self, state: Tensors) -> "ExactMeans":
        return ExactMeans(self, state)

    def norms_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        # What the changes of B and A make together, number by number, may be what B's change may.
        factors = zip(*self.split(upload), *self.split(start), strict=True)
        lost = math.hypot(*(product_norm(B - old_B, A - old_A) for B, A, old_B, old_A in factors))
        numbers = sum(layer.out_features * layer.in_features for layer in self.layers)
        return {"B": self.settings.lora_scale * lost * math.sqrt(len(upload["B"]) / numbers)}

    def norms_made(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        return {"residual": math.inf}  # of changes each of which was within its limit


class ExactMeans(CoMoments):
    """Take the means of B and A, and add what they lose to the residual."""

    method: FedExLora

    def close(self) -> Tensors:
        """Make the next state."""
        means = {name: mean.close() for name, mean in self.means.items()}
        if self.count < 2:  # nothing is lost
            return self.state | means
        factor = self.method.settings.lora_scale / self.weight
        rank = (self.count - 1) * self.method.rank
        return means | self.method.add_products(self.state, self.sums, factor, rank)


METHOD = FedExLora
