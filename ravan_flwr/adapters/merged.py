"""Compute a multi-head layer in its merged form: one weight a step, and little kept for backward.

    y = x (W + B C A)^T + b,    B C A = sum_i B_i C_i A_i

With N tokens, h heads of rank r, K of them trained, and a layer of `out` x `in`, one step takes
these multiplications beyond those of the frozen layer:

    merging W + B C A          h r in out + h r^2 in
    the gradient of the trained C_i, the cheapest of
      by tokens                N K r (out + in) + K r^2 in    (gy B)^T x, then A^T
      by factors               N K r (out + in) + N K r^2     (gy B)^T (x A^T)
      by the dense gradient    N out in + K r out in + K r^2 in    B^T (gy^T x) A^T

The factored form, y = x W^T + ((x A^T) C^T) B^T, takes N h r (out + in) + N h r^2 forward, as many
backward, and N K r^2 for the gradient of C. That is more if there are more tokens than the layer
has rows, roughly. For the backward pass it keeps x A^T and its product with C, N h r numbers each;
the merged form keeps x and the merged weight.

Merging rounds W + B C A to the dtype of W. In float32 this rounding is negligible. In bfloat16,
with a significand of 8 bits, it loses every update below 1/256 of its weight. So the merged form is
used for inputs of at least 32 bits, outside autocast, and weights are widened to that precision.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from ravan_flwr.adapters.stored import autocasts

MIN_BITS = 32  # of a dtype in which merging loses no small update


def keeps_small_updates(weight: Tensor, x: Tensor) -> bool:
    """Return whether merging in the dtype of x keeps small updates of the weight."""
    if not weight.is_floating_point() or torch.finfo(x.dtype).bits < MIN_BITS:
        return False
    return not autocasts(x)


class MergedLinear(torch.autograd.Function):
    """The merged form, with B (out, h r), C (h, r, r), A (h r, in); W, b, B and A are constants.

    The gradient of C is computed for the heads `trained`, all if None; it is zero for the others.
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
    """Return B_i^T gy^T x A_i^T for the trained heads, zero for the others: (heads, r, r)."""
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
    """Return the cheapest way to compute the gradient of `heads` cores: a key of the costs."""
    costs = gradient_costs(tokens, out, in_, heads, rank)
    return min(costs, key=costs.__getitem__)


def gradient_costs(tokens: int, out: int, in_: int, heads: int, rank: int) -> dict[str, int]:
    """Return the multiplications of each way."""
    width = heads * rank
    thin = tokens * width * (out + in_)
    last = width * rank * in_
    return {
        "tokens": thin + last,
        "factors": thin + tokens * width * rank,
        "dense": tokens * out * in_ + width * out * in_ + last,
    }


def merged_cost(tokens: int, out: int, in_: int, heads: int, trained: int, rank: int) -> int:
    """Return a merged step's cost beyond the frozen layer's; without backward if `trained` is 0."""
    merge = heads * rank * in_ * (out + rank)
    if not trained:
        return merge
    return merge + min(gradient_costs(tokens, out, in_, trained, rank).values())


def factored_cost(tokens: int, out: int, in_: int, heads: int, trained: int, rank: int) -> int:
    """Return a factored step's cost beyond the frozen layer's, as `merged_cost`."""
    pass_ = tokens * heads * rank * (out + in_ + rank)
    return 2 * pass_ + tokens * trained * rank * rank if trained else pass_
