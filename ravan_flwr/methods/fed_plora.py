"""Train Fed-PLoRA: a LoRA as r parallel modules of rank one (Zhang et al., 2026).

    y = W x + b + scale sum_j B_j A_j x

A client with a budget fraction draws r_c = floor(fraction * r) of the modules at random, the same
in all layers, and trains those. The others are merged into its frozen weight, so that it begins
where the server is. Each B_j and each A_j is averaged over the clients that trained module j, and
stays where nobody did. What comes of it is no mean of products; with whole budgets it is FedIT.

An upload is {"B", "A"} of the chosen modules, and {"modules": packed bits} that say which they are.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ravan_flwr.adapters import LoRALinear
from ravan_flwr.methods import affordable
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import NormLimits
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import check_form, pack_bits, unpack_bits


class ParallelLoRALinear(LoRALinear):
    """Train some modules of a LoRA layer; the others are constants beside the frozen weight."""

    chosen: Tensor  # for each module, whether it is trained
    folded_columns: Tensor | None  # of B
    folded_rows: Tensor | None  # of A

    def set_factors(self, B: Tensor, A: Tensor) -> None:
        """Take copies of these as B and A, all modules of which are trained then."""
        super().set_factors(B, A)
        self.chosen = torch.ones(len(A), dtype=torch.bool)
        self.register_buffer("folded_columns", None, persistent=False)
        self.register_buffer("folded_rows", None, persistent=False)

    def fold_all_but(self, chosen: Tensor) -> None:
        """Train the chosen modules alone."""
        B, A = self.B.detach(), self.A.detach()
        super().set_factors(B[:, chosen], A[chosen])
        self.chosen, self.folded_columns, self.folded_rows = chosen, B[:, ~chosen], A[~chosen]

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.folded_columns is None or self.folded_rows is None:
            return y
        return y + self.scale * F.linear(F.linear(x, self.folded_rows), self.folded_columns)

    def delta_weight(self) -> Tensor:
        """Compute scale B A of all modules, (out, in)."""
        delta = super().delta_weight()
        if self.folded_columns is None or self.folded_rows is None:
            return delta
        return delta + self.scale * self.folded_columns @ self.folded_rows


class FedPLora(NormLimits, LoraMethod):
    """Keep the state {"B", "A"}."""

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

    def start_of(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        chosen, (Bs, As) = self.modules(upload), self.split(sent)
        return self.pack([B[:, chosen] for B in Bs], [A[chosen] for A in As])

    def modules(self, upload: Mapping[str, Tensor]) -> Tensor:
        """Tell for each module whether the upload has it."""
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
            adapter.fold_all_but(chosen)

    def upload(self, adapters: Sequence[Any]) -> Tensors:
        return super().upload(adapters) | {"modules": pack_bits(adapters[0].chosen)}


class ModuleMeans:
    """Keep the sums of every module's B_j and A_j, and what the uploads that had them weigh."""

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
        """Make the next state."""
        means = {name: (total / self.weights[name]).float() for name, total in self.sums.items()}
        return {n: torch.where(w > 0, means[n], self.state[n]) for n, w in self.weights.items()}


METHOD = FedPLora
