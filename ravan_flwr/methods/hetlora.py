"""Train HetLoRA: LoRA of a rank by each client's budget (Cho et al., 2024).

A client with a share of the budget trains r_c = floor(share * r) of the r ranks, at least one:
the server sends it B[:, :r_c] and A[:r_c]. Its reply is padded with zeros to rank r and
weighted, layer by layer, by the norm of its delta-weight:

    S_c = |B_c A_c|_F,    p_c = S_c / sum S,    B <- sum_c p_c B_c,    A <- sum_c p_c A_c

A layer in which every reply's delta-weight is zero keeps what it was. With
`weighting=examples` p_c is proportional to S_c times the number of examples.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.adapters.lora import product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import RankedLora


class HetLora(RankedLora):
    """Let a client train the first ranks of a LoRA."""

    def open_round(self, state: Tensors) -> "NormWeighted":
        return NormWeighted(self, state)


class NormWeighted:
    """Sum up S_c B_c and S_c A_c, padded, and S_c, per layer."""

    def __init__(self, method: HetLora, state: Tensors) -> None:
        self.method = method
        self.old = method.split(state)
        Bs, As = self.old
        self.Bs = [torch.zeros_like(B, dtype=torch.float64) for B in Bs]
        self.As = [torch.zeros_like(A, dtype=torch.float64) for A in As]
        self.norms = [0.0] * len(Bs)

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        Bs, As = self.method.split(upload)
        for layer, (B, A) in enumerate(zip(Bs, As, strict=True)):
            norm, rank = weight * product_norm(B, A), len(A)
            self.Bs[layer][:, :rank].add_(B, alpha=norm)
            self.As[layer][:rank].add_(A, alpha=norm)
            self.norms[layer] += norm

    def close(self) -> Tensors:
        """Make the next state."""
        Bs, As = (
            [total / norm if norm else old for total, norm, old in zip(*parts, strict=True)]
            for parts in ((self.Bs, self.norms, self.old[0]), (self.As, self.norms, self.old[1]))
        )
        return self.method.pack(Bs, As)


METHOD = HetLora
