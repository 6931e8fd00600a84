"""Train raFLoRA: FlexLoRA whose mean is taken rank by rank (Wu et al., 2026).

A client with a budget fraction trains the first r_c = floor(fraction * r) ranks, as in FlexLoRA.
FlexLoRA's mean of the products counts a client as zero in the ranks that it does not have, so
that these shrink from round to round. Here each rank is averaged over the clients that hold it:

    U S V^T = sum_j sum_{c: r_c >= j} w_c / N_j  B_c[:, j] A_c[j],    N_j = sum_{c: r_c >= j} w_c

The ranks between two clients' r_c have the same clients: these are the paper's partitions. A rank
that no reply of the round holds stays as it was. With whole budgets this is FlexLoRA.

How much a reply counts in a rank is known when all have come. So all are kept until then.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.flexlora import FlexLora, MeanOfProducts


class RaFLora(FlexLora):
    """Let a client train the leading directions of a LoRA, and average each over its clients."""

    def open_round(self, state: Tensors) -> "MeanOfRanks":
        return MeanOfRanks(self, state)

    def norms_made(self, state: Tensors, alone: Mapping[str, float]) -> dict[str, float]:
        # The ranks from each client's r_c on are one mean; there are no more means than ranks.
        made = super().norms_made(state, alone)
        norm = self.longest_row(state) * float(state["B"].double().norm())
        return made | {"B": self.rank * max(made["B"], norm)}

    def product_size(self, B: Tensor, A: Tensor) -> float:
        """Compute the largest norm of B[:, m:] A[m:] over all m.

        A client's share in a rank grows with the rank, from round to round differently. So what it
        adds is a mean of such tails, whatever the others hold.
        """
        B, A = B.double(), A.double()
        products = (B.mT @ B) * (A @ A.mT)
        tails = products.flip(0, 1).cumsum(0).cumsum(1).diagonal()
        return float(tails.clamp(min=0).max().sqrt())


class MeanOfRanks(MeanOfProducts):
    """Keep the replies, and sum up their ranks, each with its share among those that hold it."""

    def __init__(self, method: RaFLora, state: Tensors) -> None:
        super().__init__(method, state)
        self.replies: list[tuple[Mapping[str, Tensor], float]] = []

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        self.replies.append((upload, weight))

    def close(self) -> Tensors:
        """Make the next state."""
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
