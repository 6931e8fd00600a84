"""Compute a multi-head layer merged: one weight a step, and a backward pass that keeps little.

    y = x (W + B C A)^T + b,    B C A = sum_i B_i C_i A_i

With N tokens, h heads of rank r and a layer of `out` x `in`, multiplications for one step:

    merging W + B C A          h r in out + h r^2 in
    the gradient of the K trained C_i, the cheapest of
      by tokens                N K r (out + in) + K r^2 in    (gy B)^T x, then A^T
      by factors               N K r (out + in) + N K r^2     (gy B)^T (x A^T)
      by the dense gradient    N out in + K r out in + K r^2 in    B^T (gy^T x) A^T

The factored form, y = x W^T + ((x A^T) C^T) B^T, takes N h r (out + in) + N h r^2 forward, as
much backward, and N K r^2 for the gradient of C: more as soon as there are more tokens than the
layer has rows or so. For the backward pass it keeps x A^T and its product with C, N h r numbers
each, where the merged form keeps x and the merged weight.

Merging rounds W + B C A to the dtype of W. In float32 that loses nothing that matters; in
bfloat16, of 8 bits, it loses every update below a 256th of its weight. So the merged form is
for inputs of float32 or more, outside autocast, and for weights that can be widened to that.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ravan_flwr.adapters.stored import autocasts

ENOUGH_BITS = 32  # of a weight in which no small update is lost


def loses_nothing(weight: Tensor, x: Tensor) -> bool:
    """Tell whether a weight, widened and merged, keeps small updates: by the products' bits."""
    if not weight.is_floating_point() or torch.finfo(x.dtype).bits < ENOUGH_BITS:
        return False
    return not autocasts(x)


class MergedLinear(torch.autograd.Function):
    """Compute y as above, with B (out, h r), C (h, r, r), A (h r, in); W, b, B and A are constants.

    C's gradient is that of the heads `trained`, all of them if None, and zero for the others.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, B: Tensor, C: Tensor, A: Tensor,
        trained: Tensor | None,
    ) -> Tensor:  # fmt: skip
        heads, rank, _ = C.shape
        merged = torch.addmm(weight, B, torch.bmm(C, A.view(heads, rank, -1)).flatten(0, 1))
        ctx.heads = heads
        for_x, for_C = ctx.needs_input_grad[0], ctx.needs_input_grad[4]
        ctx.save_for_backward(merged if for_x else None, x if for_C else None, B, A, trained)
        return F.linear(x, merged, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        merged, x, B, A, trained = ctx.saved_tensors
        gx = gC = None
        if merged is not None:
            gx = gy @ merged
        if x is not None:
            flat = gy.reshape(-1, gy.shape[-1]), x.reshape(-1, x.shape[-1])
            gC = core_gradients(*flat, B, A, ctx.heads, trained)
        return gx, None, None, None, gC, None, None


def core_gradients(
    gy: Tensor, x: Tensor, B: Tensor, A: Tensor, heads: int, trained: Tensor | None
) -> Tensor:
    """Compute B_i^T gy^T x A_i^T for the trained heads, zero for the others: (heads, r, r)."""
    rank = len(A) // heads
    As = A.view(heads, rank, -1)
    if trained is not None:
        B = B.view(-1, heads, rank)[:, trained].flatten(1)
        As = As[trained]
    number = len(As)
    if not number:
        return A.new_zeros(heads, rank, rank)
    way = cheapest_way(len(x), B.shape[0], x.shape[1], number, rank)
    if way == "factors":
        v = (gy @ B).view(-1, number, rank)
        u = (x @ As.flatten(0, 1).mT).view(-1, number, rank)
        gradients = torch.bmm(v.permute(1, 2, 0), u.transpose(0, 1))
    else:
        left = (gy @ B).mT @ x if way == "tokens" else B.mT @ (gy.mT @ x)
        gradients = torch.bmm(left.view(number, rank, -1), As.mT)
    if trained is None:
        return gradients
    return gradients.new_zeros(heads, rank, rank).index_copy_(0, trained, gradients)


# The cost model, in multiplications.


def cheapest_way(tokens: int, out: int, in_: int, heads: int, rank: int) -> str:
    """Find the cheapest way to the gradient of that many cores: by tokens, factors, or dense."""
    costs = gradient_costs(tokens, out, in_, heads, rank)
    return min(costs, key=costs.__getitem__)


def gradient_costs(tokens: int, out: int, in_: int, heads: int, rank: int) -> dict[str, int]:
    """Count the multiplications of each way."""
    width = heads * rank
    thin = tokens * width * (out + in_)
    last = width * rank * in_
    return {
        "tokens": thin + last,
        "factors": thin + tokens * width * rank,
        "dense": tokens * out * in_ + width * out * in_ + last,
    }


def merged_cost(tokens: int, out: int, in_: int, heads: int, trained: int, rank: int) -> int:
    """Count a merged step beyond what the frozen layer costs; no `trained`, no backward."""
    merge = heads * rank * in_ * (out + rank)
    if not trained:
        return merge
    return merge + min(gradient_costs(tokens, out, in_, trained, rank).values())


def factored_cost(tokens: int, out: int, in_: int, heads: int, trained: int, rank: int) -> int:
    """Count a factored step beyond what the frozen layer costs; no `trained`, no backward."""
    pass_ = tokens * heads * rank * (out + in_ + rank)
    return 2 * pass_ + tokens * trained * rank * rank if trained else pass_
