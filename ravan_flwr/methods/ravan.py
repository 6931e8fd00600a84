"""Train RAVAN: multi-head low-rank adaptation for federated fine-tuning (Raje et al.).

    y = W x + b + sum_i s_i B_i H_i A_i x

B_i (out, r) and A_i (r, in) are frozen and derived from the seed on both sides, so they never
travel. The global state is one tensor H (layers, heads, r, r), zero at first.

In a round a client with a budget fraction chooses floor(fraction * heads) heads in each layer, at
least one. It trains their H_i and s_i, with s_i = 1 at the start of every round. It uploads the
products s_i H_i of these heads, and one bit for each head that marks them. For each layer the
server computes (equation 8)

    H_i <- mean over the clients that trained head i of s_i H_i;    unchanged if none did

Over these clients the mean is exact: B_i and A_i are the same for all, so the delta-weight of the
aggregate is the mean of the clients' delta-weights. With `head-mean = all` the mean is over all
clients of the round; a client that did not train the head counts with the old H_i. With whole
budgets both means are the same.

With one head and s = 1 RAVAN is Fed-SB (fed_sb.py) up to the initialisation. With `init =
data-aware` or `first-round` the bases result from a calibration round instead of the seed
(calibrated_bases.py), and travel to each client once.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import Layer, MultiHeadLinear
from ravan_flwr.methods.base import Settings, Tensors, check_rank
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.calibrated_bases import DataAwareBases, FirstRound
from ravan_flwr.methods.extensions import NormLimits, SumsChanges
from ravan_flwr.methods.multihead import (
    MultiHeadMethod,
    best_heads,
    score_heads,
    selection_probabilities,
)
from ravan_flwr.methods.tensors import check_form, check_names, check_tensor, pack_bits, unpack_bits


class Ravan(SumsChanges, NormLimits, MultiHeadMethod):
    """Keep the state {"H"}; an upload is {"H": products, "heads": packed bits}."""

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.heads = self.budget_units = settings.heads
        self.init, self.trains_scales = settings.init, settings.scaling == "trained"
        self.rank = settings.rank or self._largest_rank()
        self.mean_over_cohort = settings.head_mean == "all"
        check_rank(self.rank, self.side)
        if settings.init == "data-aware":
            self.init = "gram-schmidt"  # placeholder bases until the calibration
            self.calibration = DataAwareBases(settings, self.layers, self.heads, self.rank)
        elif settings.init == "first-round":
            self.init = "gram-schmidt"
            self.calibration = FirstRound(settings, self.layers, self.heads, self.rank, self._shape)

    def _largest_rank(self) -> int:
        """Return the largest r with layers * heads * (r^2 + 1) parameters within the budget."""
        per_head = (self.budget - self._extra_parameters()) / (len(self.layers) * self.heads)
        scale = int(self.trains_scales)
        rank = math.isqrt(max(0, math.floor(per_head) - scale))
        if rank < 1:
            raise ValueError(
                f"heads = {self.heads}: the budget of {self.budget} trainable parameters has "
                f"room for {per_head:.2f} a head, expected at least {1 + scale}; "
                "lower heads or set rank"
            )
        return min(rank, self.side)

    @property
    def _shape(self) -> tuple[int, ...]:
        return len(self.layers), self.heads, self.rank, self.rank  # of H

    def _extra_parameters(self) -> int:
        """Return the number of trained parameters beside the heads."""
        return 0

    def trainable_parameters(self) -> int:
        per_head = self.rank**2 + int(self.trains_scales)
        return len(self.layers) * self.heads * per_head + self._extra_parameters()

    def upload_shapes(self, fraction: float) -> dict[str, tuple[int, ...]]:
        return {"H": (len(self.layers) * affordable(fraction, self.heads), self.rank, self.rank)}

    def upload_bytes(self, fraction: float) -> int:
        return super().upload_bytes(fraction) + math.ceil(len(self.layers) * self.heads / 8)

    # The server's half.

    def initial_state(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        return {"H": torch.zeros(self._shape)}

    def check(self, upload: Mapping[str, Tensor], fraction: float) -> None:
        check_names(upload, ["H", "heads"])
        total = len(self.layers) * self.heads
        packed = check_form(upload, "heads", [math.ceil(total / 8)], torch.uint8)
        bits = unpack_bits(packed)
        if bits[total:].any():
            raise ValueError(f"heads marks a head beyond the last of {total}")
        counts = bits[:total].view(len(self.layers), self.heads).sum(1).tolist()
        per_layer = affordable(fraction, self.heads)
        if self.settings.selection == "layer" and set(counts) != {per_layer}:
            raise ValueError(f"heads marks {counts} heads by layer, expected {per_layer} in each")
        if self.settings.selection == "global" and sum(counts) != per_layer * len(self.layers):
            raise ValueError(
                f"heads marks {sum(counts)} heads, expected {per_layer * len(self.layers)}"
            )
        check_form(upload, "H", [sum(counts), self.rank, self.rank], torch.float32)

    def heads_in(self, upload: Mapping[str, Tensor]) -> list[list[int]]:
        marked = unpack_bits(upload["heads"], len(self.layers) * self.heads)
        return self.heads_in_rows({"H": marked})

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        H = torch.full_like(state["H"], torch.nan).flatten(0, 1)
        H[unpack_bits(upload["heads"], len(H))] = upload["H"]
        return {"H": H.view_as(state["H"])}

    def find_start(self, upload: Mapping[str, Tensor], sent: Tensors) -> Tensors:
        H = sent["H"].flatten(0, 1)
        chosen = unpack_bits(upload["heads"], len(H))
        return {"H": H if chosen.all() else H[chosen]}  # a view, not a copy, of all

    def coverage(self, state: Mapping[str, Tensor], fraction: float) -> Tensors:
        number = affordable(fraction, self.heads)
        norms = state["H"].double().norm(dim=(2, 3))
        if self.settings.scoring == "random":
            norms.zero_()  # all heads tie
        return {"H": selection_probabilities(norms, number)[:, :, None, None]}

    def rows(self, state: Mapping[str, Tensor]) -> dict[str, int]:
        return {"H": len(self.layers) * self.heads}

    def rows_trained(
        self, state: Mapping[str, Tensor], fraction: float, random: torch.Generator
    ) -> Tensors:
        number = affordable(fraction, self.heads)
        if number == self.heads:
            return super().rows_trained(state, fraction, random)
        if self.settings.scoring == "random":
            scores = torch.rand(len(self.layers), self.heads, generator=random)
        else:
            # In double precision: client and server must rank the heads alike. Unlike in
            # `score_heads` no norm is divided by that of the layer's weight, since the order within
            # a layer is the same, and this score is refused with selection=global (checks.py).
            scores = state["H"].double().norm(dim=(2, 3))
        chosen = best_heads(scores, number, self.settings.selection, random)
        rows = torch.zeros(len(self.layers), self.heads, dtype=torch.bool)
        for row, heads in zip(rows, chosen, strict=True):
            row[heads] = True
        return {"H": rows.flatten()}

    def train_rows(
        self, adapters: Sequence[MultiHeadLinear], rows: Mapping[str, Tensor], fraction: float
    ) -> None:
        chosen = rows["H"].view(len(self.layers), self.heads)
        max_heads = affordable(fraction, self.heads) * len(self.layers)
        if int(chosen.sum()) > max_heads:
            raise ValueError(
                f"asked to train {int(chosen.sum())} heads, expected {max_heads} at most with a "
                f"budget of {fraction:g}"
            )
        for adapter, heads in zip(adapters, self.heads_in_rows(rows), strict=True):
            if len(heads) < self.heads:
                adapter.train_heads(heads)
        self._freeze_scales(adapters)

    def heads_in_rows(self, rows: Mapping[str, Tensor]) -> list[list[int]]:
        chosen = rows["H"].view(len(self.layers), self.heads)
        return [row.nonzero().flatten().tolist() for row in chosen]

    def open_round(self, state: Tensors) -> "HeadMeans":
        return HeadMeans(state["H"], mean_over_cohort=self.mean_over_cohort)

    # The client's half.

    def load(self, adapters: Sequence[MultiHeadLinear], tensors: Mapping[str, Tensor]) -> None:
        H = check_tensor(tensors, "H", self._shape, torch.float32)
        with torch.no_grad():
            for adapter, layer_H in zip(adapters, H, strict=True):
                adapter.train_all_heads()
                adapter.H.copy_(layer_H)
                adapter.s.fill_(1.0)

    def choose(
        self, adapters: Sequence[MultiHeadLinear], fraction: float, random: torch.Generator,
        backward: Callable[..., object],
    ) -> None:  # fmt: skip
        number = affordable(fraction, self.heads)
        if number < self.heads:
            scores = score_heads(self.settings.scoring, adapters, random, backward)
            chosen = best_heads(scores, number, self.settings.selection, random)
            for adapter, heads in zip(adapters, chosen, strict=True):
                adapter.train_heads(heads)
        self._freeze_scales(adapters)

    def _freeze_scales(self, adapters: Sequence[MultiHeadLinear]) -> None:
        if not self.trains_scales:
            for adapter in adapters:
                (adapter.subset or adapter).s.requires_grad_(False)

    def upload(self, adapters: Sequence[MultiHeadLinear]) -> Tensors:
        chosen = torch.zeros(len(adapters), self.heads, dtype=torch.bool)
        for row, adapter in zip(chosen, adapters, strict=True):
            row[adapter.trained_heads()] = True
        products = torch.cat([adapter.products() for adapter in adapters])
        return {"H": products.cpu(), "heads": pack_bits(chosen.flatten())}

    # The learned update.

    def head_norms(self, adapters: Sequence[MultiHeadLinear]) -> list[list[float]]:
        norms = []
        for layer in adapters:
            cores = layer.s[:, None, None] * layer.H
            # |B C A|^2 = sum((B^T B C) * (C A A^T)), all of side r
            left = torch.bmm(layer.B.mT @ layer.B, cores)
            right = torch.bmm(cores, layer.A @ layer.A.mT)
            norms.append((left * right).sum((1, 2)).clamp(min=0).sqrt().tolist())
        return norms


class HeadMeans:
    """Equation 8: the mean of each head over the clients that trained it.

    An upload is {"H": (selected, r, r), "heads": packed bits}. `heads` has one bit for each (layer,
    head), the first in the lowest bit of the first byte. The set bits mark the selected heads, and
    `H` has their products in that order.

    With `mean_over_cohort` a head's mean is over all clients of the round: a client that did not
    upload the head counts with its old value.
    """

    def __init__(self, H: Tensor, *, mean_over_cohort: bool = False) -> None:
        self.old, self.mean_over_cohort = H, mean_over_cohort
        self.sum = torch.zeros_like(H, dtype=torch.float64).flatten(0, 1)  # (layers*heads, r, r)
        self.weight = torch.zeros(len(self.sum), dtype=torch.float64)  # (layers*heads,)
        self.total = 0.0

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's products to the sums of the heads that its bits mark."""
        chosen = unpack_bits(upload["heads"], len(self.weight))
        indices = chosen.nonzero().flatten()
        self.sum.index_add_(0, indices, upload["H"].double(), alpha=weight)
        self.weight[chosen] += weight
        self.total += weight

    def close(self) -> Tensors:
        """Return the next H: the mean where a client trained the head, else the old value."""
        trained = self.weight > 0
        H = self.old.flatten(0, 1).clone()
        mean = self.sum[trained] / self.weight[trained, None, None]
        if self.mean_over_cohort:
            fractions = (self.weight[trained] / self.total)[:, None, None]
            mean = torch.lerp(H[trained].double(), mean, fractions)
        H[trained] = mean.float()
        return {"H": H.view_as(self.old)}


METHOD = Ravan
