"""Train raFLoRA: FlexLoRA with a mean for each rank (Wu et al., 2026).

A client with a budget fraction trains the first r_c = floor(fraction * r) ranks, as in FlexLoRA.
In FlexLoRA's mean of the products, a client counts as zero in the ranks that it does not train. So
these ranks shrink from round to round. raFLoRA averages each rank over the clients that train it:

    U S V^T = sum_j sum_{c: r_c >= j} w_c / N_j  B_c[:, j] A_c[j],    N_j = sum_{c: r_c >= j} w_c

Ranks between two successive values of r_c have the same clients; the paper calls them partitions. A
rank that no client of the round trained keeps its old factors. With whole budgets raFLoRA is
FlexLoRA.

The weight of a reply in a rank is known only after the last reply, so the server keeps all replies
of a round.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.flexlora import FlexLora, MeanOfProducts


class RaFLora(FlexLora):
    """State and upload: {"B", "A"}; each rank is averaged over the clients that trained it."""

    def open_round(self, state: Tensors) -> "MeanOfRanks":
        return MeanOfRanks(self, state)

    def norm_bounds(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        # The next product is a sum of at most `rank` means, one for each partition.
        made = super().norm_bounds(state, alone)
        norm = self.max_row_norm(state) * float(state["B"].double().norm())
        return made | {"B": self.rank * max(made["B"], norm)}

    def product_bound(self, B: Tensor, A: Tensor) -> float:
        """Return the largest norm of B[:, m:] A[m:] over all m.

        A client's weight in a rank, w_c / N_j, does not decrease with j. So its contribution is a
        weighted sum of such tails with weights of at most 1 in all, whatever the others train.
        """
        B, A = B.double(), A.double()
        products = (B.mT @ B) * (A @ A.mT)
        tails = products.flip(0, 1).cumsum(0).cumsum(1).diagonal()
        return float(tails.clamp(min=0).max().sqrt())


class MeanOfRanks(MeanOfProducts):
    """The replies of a round; each rank is averaged over its clients at the end."""

    def __init__(self, method: RaFLora, state: Tensors) -> None:
        super().__init__(method, state)
        self.replies: list[tuple[Mapping[str, Tensor], float]] = []

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        self.replies.append((upload, weight))

    def close(self) -> Tensors:
        """Return the next state."""
        rank_of = [len(self.method.split(upload)[1][0]) for upload, _ in self.replies]
        totals = torch.zeros(self.method.rank, dtype=torch.float64)
        for rank, (_, weight) in zip(rank_of, self.replies, strict=True):
            totals[:rank] += weight
        for rank, (upload, weight) in zip(rank_of, self.replies, strict=True):
            self._add_ranks(upload, weight / totals[:rank])
        missing = (totals == 0).double()
        if missing.any():
            self._add_ranks(self.state, missing)
        self.weight = 1.0
        return super().close()

    def _add_ranks(self, factors: Mapping[str, Tensor], fractions: Tensor) -> None:
        for total, B, A in zip(self.sums, *self.method.split(factors), strict=True):
            total.add(B * fractions, A)


METHOD = RaFLora
