"""Train FLoRA: stack the clients' factors, and add their product to the weight (Wang et al., 2024).

    W <- W + scale sum_c p_c B_c A_c,    p_c = w_c / sum w

The sum is one product: the p_c B_c side by side, times the A_c stacked. It is exact, also if the
clients' ranks differ: a client with a budget fraction trains r_c = floor(fraction * r) ranks, at
least one. Every round starts with B = 0 and a new random A.

The sum of all rounds so far travels with every broadcast (`ResidualLora`). Both sides draw A from
(seed, layer, number of rounds with an effect); that number is part of the state.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.adapters.lora import ProductSum, product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import ProductSums, ResidualLora
from ravan_flwr.methods.tensors import check_tensor


class Flora(NormLimits, ResidualLora):
    """State: {"residual", "residual-rank", "rounds"}; upload: {"B", "A"}."""

    by_ranks = True

    def initial_state(self, adapters: Sequence[LoRALinear]) -> Tensors:
        return self.empty_residual() | {"rounds": torch.zeros(1, dtype=torch.int32)}

    def load(self, adapters: Sequence[LoRALinear], tensors: Mapping[str, Tensor]) -> None:
        self.load_residual(adapters, tensors)
        for adapter, A in zip(adapters, self.first_A(tensors), strict=True):
            adapter.set_factors(torch.zeros(adapter.base.out_features, self.rank), A)

    def first_A(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """Draw the A with which a round from this state starts."""
        number = int(check_tensor(tensors, "rounds", (1,), torch.int32))
        return self.draw_A(number) if number else self.initial_A

    def choose(
        self, adapters: Sequence[LoRALinear], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        rank = affordable(fraction, self.rank)
        for adapter in adapters:
            adapter.set_factors(adapter.B[:, :rank], adapter.A[:rank])

    def find_start(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        rank = len(upload["B"]) // sum(self.outs)
        return self.pack(
            [torch.zeros(out, rank) for out in self.outs], [A[:rank] for A in self.first_A(sent)]
        )

    def open_round(self, state: Tensors) -> "StackedProducts":
        return StackedProducts(self, state)

    def norms_if_alone(self, upload: Mapping[str, Tensor], start: Tensors) -> dict[str, float]:
        return {"B": math.hypot(*map(product_norm, *self.split(upload)))}

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        added = self.settings.lora_scale * alone.get("B", 0.0)
        return {"residual": float(state["residual"].double().norm()) + added}


class StackedProducts(ProductSums):
    """The clients' stacked B_c and A_c for each layer."""

    method: Flora

    def close(self) -> Tensors:
        """Return the next state."""
        return self.next_state(self.sums, self.rank)

    def next_state(self, products: Sequence[ProductSum], rank: int | list[int]) -> Tensors:
        """Return the state to which these sums of products, of that rank, were added."""
        factor = self.method.settings.lora_scale / self.weight
        added = self.method.add_products(self.state, products, factor, rank)
        return added | {"rounds": self.state["rounds"] + 1}


METHOD = Flora
