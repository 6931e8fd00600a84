"""Train Fed-PLoRA: a LoRA as r parallel modules of rank one (Zhang et al., 2026).

    y = W x + b + scale sum_j B_j A_j x

A client with a budget fraction draws r_c = floor(fraction * r) of the modules at random, at least
one and the same in all layers, and trains them. The other modules stay in its forward pass as
constants, so that the client starts from the server's model. For each module the server computes

    B_j <- mean_c B_cj,    A_j <- mean_c A_cj    over the clients that trained module j

and leaves the module unchanged if none did. The method is not exact: the result is not the mean of
the products. With whole budgets it is FedIT (fedit.py).

An upload is {"B", "A"} of the chosen modules, and {"modules": packed bits}, which marks them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_form, pack_bits, unpack_bits


class ParallelLoRALinear(LoRALinear):
    """A LoRA layer of which some modules are trained, and the others are constants."""

    chosen: Tensor  # (r,): whether each module is trained
    frozen_columns: Tensor | None  # of B
    frozen_rows: Tensor | None  # of A

    def set_factors(self, B: Tensor, A: Tensor) -> None:
        """Load copies of B and A, and train all modules."""
        super().set_factors(B, A)
        self.chosen = torch.ones(len(A), dtype=torch.bool)
        self.register_buffer("frozen_columns", None, persistent=False)
        self.register_buffer("frozen_rows", None, persistent=False)

    def freeze_all_but(self, chosen: Tensor) -> None:
        """Train only the chosen modules."""
        B, A = self.B.detach(), self.A.detach()
        super().set_factors(B[:, chosen], A[chosen])
        self.chosen, self.frozen_columns, self.frozen_rows = chosen, B[:, ~chosen], A[~chosen]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.frozen_columns is None or self.frozen_rows is None:
            return y
        return y + self.scale * F.linear(F.linear(x, self.frozen_rows), self.frozen_columns)

    def delta_weight(self) -> Tensor:
        """Return scale B A of all modules, (out, in)."""
        delta = super().delta_weight()
        if self.frozen_columns is None or self.frozen_rows is None:
            return delta
        return delta + self.scale * self.frozen_columns @ self.frozen_rows


class FedPLora(NormLimits, LoraMethod):
    """State: {"B", "A"}; upload: {"B", "A", "modules"}."""

    layer_class = ParallelLoRALinear
    by_ranks = True

    def upload_bytes(self, fraction: float) -> int:
        return super().upload_bytes(fraction) + math.ceil(self.rank / 8)

    # The server's half.

    def check(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        super().check({n: tensor for n, tensor in upload.items() if n != "modules"}, fraction)
        packed = check_form(upload, "modules", [math.ceil(self.rank / 8)], torch.uint8)
        chosen, number = unpack_bits(packed), affordable(fraction, self.rank)
        if chosen[self.rank :].any() or int(chosen.sum()) != number:
            raise ValueError(
                f"modules marks {chosen.nonzero().flatten().tolist()}, expected {number} of the "
                f"first {self.rank}"
            )

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        expanded = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
        chosen = self.modules(upload)
        for B, A, new_B, new_A in zip(*self.split(expanded), *self.split(upload), strict=True):
            B[:, chosen], A[chosen] = new_B, new_A
        return expanded

    def find_start(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        chosen, (Bs, As) = self.modules(upload), self.split(sent)
        return self.pack([B[:, chosen] for B in Bs], [A[chosen] for A in As])

    def modules(self, upload: Mapping[str, Tensor]) -> Tensor:
        """Return a mask of the modules that the upload has."""
        return unpack_bits(upload["modules"], self.rank)

    def open_round(self, state: Tensors) -> "ModuleMeans":
        return ModuleMeans(self, state)

    # The client's half.

    def choose(
        self, adapters: Sequence[Any], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        number = affordable(fraction, self.rank)
        if number == self.rank:
            return
        chosen = torch.zeros(self.rank, dtype=torch.bool)
        chosen[torch.randperm(self.rank, generator=random)[:number]] = True
        for adapter in adapters:
            adapter.freeze_all_but(chosen)

    def upload(self, adapters: Sequence[Any]) -> Tensors:
        return super().upload(adapters) | {"modules": pack_bits(adapters[0].chosen)}


class ModuleMeans:
    """The weighted sums of every module's B_j and A_j, and the sums of their weights."""

    def __init__(self, method: FedPLora, state: Tensors) -> None:
        self.method, self.state = method, state
        self.sums, self.weights = (
            {name: torch.zeros_like(old, dtype=torch.float64) for name, old in state.items()}
            for _ in range(2)
        )

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's modules."""
        for name, tensor in self.method.expand_upload(upload, self.state).items():
            self.sums[name] += weight * tensor.double().nan_to_num(0.0)
            self.weights[name] += weight * (~tensor.isnan()).double()

    def close(self) -> Tensors:
        """Return the next state."""
        means = {name: (total / self.weights[name]).float() for name, total in self.sums.items()}
        return {n: torch.where(w > 0, means[n], self.state[n]) for n, w in self.weights.items()}


METHOD = FedPLora
