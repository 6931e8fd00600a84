"""Make the frozen bases of RAVAN's heads: B_i (out, r) and A_i (r, in), i = 1..h.

The paper (section 3.1) compares four schemes:

- `normal`: every entry is drawn from a normal distribution. In high dimension the heads' subspaces
  are nearly orthogonal.
- `gram-schmidt`: the r h columns of all B_i, and the r h rows of all A_i, are orthonormalised
  together. The heads' subspaces are exactly orthogonal.
- `constant`: all heads share one B and one A.
- `shared-subspace`: B_i = M R_i and A_i = R_i N with different invertible R_i.

The paper does not give the width of the normal distribution. Here the columns of every B_i and the
rows of every A_i have norm 1 in every scheme, in expectation where they are random. So one learning
rate suits all schemes.

These bases never travel: both sides compute them from (seed, layer, scheme) in float64 on the CPU,
and round them to float32.
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ravan_flwr.seeding import generator

Pair = tuple[Tensor, Tensor]


def make_bases(
    scheme: str, *, heads: int, rank: int, out_features: int, in_features: int, seed: int,
    layer: str,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return B (heads, out, r) and A (heads, r, in), in float32; r is at most a layer's side."""
    random = generator(seed, "bases", layer, scheme)
    B, A = SCHEMES[scheme](heads, rank, out_features, in_features, random)
    return B.float(), A.float()


def _normal(heads: int, rank: int, out: int, in_: int, random: torch.Generator) -> Pair:
    B = _randn(random, heads, out, rank) / math.sqrt(out)
    A = _randn(random, heads, rank, in_) / math.sqrt(in_)
    return B, A


def _gram_schmidt(heads: int, rank: int, out: int, in_: int, random: torch.Generator) -> Pair:
    B = _orthonormal_heads(heads, rank, out, random)
    A = _orthonormal_heads(heads, rank, in_, random)
    return B, A.transpose(1, 2)


def _constant(heads: int, rank: int, out: int, in_: int, random: torch.Generator) -> Pair:
    B, A = _normal(1, rank, out, in_, random)
    return B.repeat(heads, 1, 1), A.repeat(heads, 1, 1)


def _shared_subspace(heads: int, rank: int, out: int, in_: int, random: torch.Generator) -> Pair:
    (M,), (N,) = _normal(1, rank, out, in_, random)
    # Normal matrices are invertible with probability one; dividing by sqrt(r) keeps the norms.
    R = _randn(random, heads, rank, rank) / math.sqrt(rank)
    return M @ R, R @ N


def describe_bases(bases: Mapping[str, tuple[Tensor, Tensor]]) -> dict[str, Any]:
    """Return the layers' sizes, the first layer's name, and the sums of its B and A.

    It is saved with an adapter, and checked when the adapter is loaded: against loading it onto
    another network, or with other bases.
    """
    first, (B, A) = next(iter(bases.items()))
    sizes = Counter(f"{B.shape[1]} x {A.shape[2]}" for B, A in bases.values())
    sums = [float(basis.double().sum()) for basis in (B, A)]
    return {"first": first, "sizes": dict(sorted(sizes.items())), "sums": sums}


SCHEMES: dict[str, Callable[[int, int, int, int, torch.Generator], Pair]] = {
    "normal": _normal,
    "gram-schmidt": _gram_schmidt,
    "constant": _constant,
    "shared-subspace": _shared_subspace,
}


def _randn(random: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=random, dtype=torch.float64)


def _orthonormal_heads(heads: int, rank: int, side: int, random: torch.Generator) -> Tensor:
    """Draw (heads, side, rank), with orthonormal columns over all heads if they fit.

    A space of `side` dimensions has room for the columns of side // rank whole heads. Further heads
    start a new block: orthonormal among themselves, and in general position to the earlier blocks.
    """
    fit = side // rank
    blocks = []
    for start in range(0, heads, fit):
        count = min(fit, heads - start)
        # QR is Gram-Schmidt if the diagonal of R is positive.
        Q, R = torch.linalg.qr(_randn(random, side, count * rank))
        Q = Q * torch.where(R.diagonal() < 0, -1.0, 1.0)
        blocks.append(Q.reshape(side, count, rank).transpose(0, 1))
    return torch.cat(blocks)
