"""Train FedRPCA: RAVAN with client-specific changes amplified (Jhunjhunwala et al., 2025).

The clients' changes of a head in a round are the columns of a matrix M (r^2, clients). Robust PCA
splits M into a low-rank part L, common to the clients, and a sparse part S, specific to a few:

    minimise |L|_* + lambda |S|_1,    L + S = M,    lambda = 1 / sqrt(max(r^2, clients))
    H <- H + mean_c(L_c) + beta mean_c(S_c)

With beta = 1 this is RAVAN. With a larger beta, averaging reduces a single client's change less.
The paper splits the factors of a LoRA. Here the products s H are split, head by head, over the
clients that trained the head. If all clients have the same change, or there is only one, S = 0. A
reply of weight w counts as w clients with the same change.

The minimum need not be unique, for two clients for instance. So S is defined as the result of STEPS
steps of alternating directions from S = 0 (Candès et al., 2011, algorithm 1), and L = M - S. The
server keeps the replies of a round until it closes.

Only summaries of the paper were available: beta = 2 and the number of steps are ours.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.methods.tensors import unpack_bits

BETA, STEPS = 2.0, 100


class FedRPCA(Ravan):
    """State: {"H"}; upload: {"H": products, "heads": packed bits}."""

    def open_round(self, state: Tensors) -> "AmplifiedHeads":  # type: ignore[override]
        return AmplifiedHeads(state["H"])


class AmplifiedHeads:
    """The clients' changes of each head, split after the last upload."""

    def __init__(self, H: Tensor) -> None:
        self.old = H
        self.changes: list[list[Tensor]] = [[] for _ in range(H.shape[0] * H.shape[1])]
        self.weights: list[list[float]] = [[] for _ in self.changes]

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's changes of the heads that its bits mark."""
        heads = unpack_bits(upload["heads"], len(self.changes)).nonzero().flatten().tolist()
        old = self.old.flatten(0, 1)
        for head, product in zip(heads, upload["H"], strict=True):
            self.changes[head].append((product.double() - old[head]).flatten())
            self.weights[head].append(weight)

    def close(self) -> Tensors:
        """Return the next H: the amplified mean where a client trained the head, else the old."""
        H = self.old.flatten(0, 1).clone()
        for head, (changes, weights) in enumerate(zip(self.changes, self.weights, strict=True)):
            if changes:
                M, w = torch.stack(changes, 1), torch.tensor(weights, dtype=torch.float64)
                moved = (M + (BETA - 1) * sparse_part(M, w)) @ w / w.sum()
                H[head] = (H[head] + moved.view_as(H[head])).float()
        return {"H": H.view_as(self.old)}


def sparse_part(M: Tensor, weights: Tensor) -> Tensor:
    """Return S. A column of weight w counts as w equal columns: its length is times sqrt(w)."""
    if torch.equal(M, M[:, :1].expand_as(M)):
        return torch.zeros_like(M)
    total, scale = weights.sum(), weights.sqrt()
    step = 4 * M.abs().sum(0) @ weights / (len(M) * total)
    cost = step * scale / math.sqrt(max(len(M), float(total)))
    M = M * scale
    S, dual = torch.zeros_like(M), torch.zeros_like(M)
    for _ in range(STEPS):
        X = M - S + dual
        squares, V = torch.linalg.eigh(X.mT @ X)  # as many columns as clients: far less than an SVD
        sizes = squares.clamp(min=0).sqrt()
        shrinkage = (1 - step / sizes.clamp(min=torch.finfo(sizes.dtype).tiny)).clamp(min=0)
        residual = M - X @ (V * shrinkage) @ V.mT + dual
        S = residual.sign() * (residual.abs() - cost).clamp(min=0)
        dual = residual - S
    return S / scale


METHOD = FedRPCA
