"""Adapt a linear layer by RAVAN's heads: y = W x + b + sum_i s_i B_i H_i A_i x (section 3).

W, b, B_i (out, r) and A_i (r, in) are frozen; H_i (r, r) and s_i are trained. With one head and
s = 1 it is LoRA-XS and Fed-SB, up to their initialisation.

A client whose budget does not allow all heads trains some of them (`train_heads`). The others stay
in the forward pass as constants. They have no gradient and no optimiser state, and none of their
activations is kept for the backward pass.

Several clients can be computed in one pass (training/together.py). H and s are then those of all
clients, (clients * heads, r, r) and (clients * heads,), and the examples of x are in the order of
the clients.

The layer has two exact forms, factored as above and merged (merged.py). It takes the cheaper one,
which depends on its shapes, the number of tokens, and the number of trained heads.
"""

from collections.abc import Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters.merged import MergedLinear, factored_cost, keeps_small_updates, merged_cost
from ravan_flwr.adapters.stored import autocasts, cast_once


class MultiHeadLinear(nn.Module):
    """A frozen linear layer with `heads` trainable cores between frozen bases.

    `B` is (heads, out, r), `A` is (heads, r, in). The parameters are `H` (heads, r, r), initially
    zero, and `s` (heads,), initially one. `form` is "merged", "factored", or "auto".
    """

    A_stack: Tensor  # (heads * r, in): all A_i stacked, for one product with all
    B_stack: Tensor  # (out, heads * r): all B_i side by side

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, form: str = "auto") -> None:
        super().__init__()
        self.form = form
        heads, rank, _ = A.shape
        self.base = base.requires_grad_(False)
        self.heads, self.rank = heads, rank
        device = base.weight.device
        A_stack, B_stack = A.flatten(0, 1), side_by_side(B)
        self.register_buffer("A_stack", A_stack.to(device).contiguous(), persistent=False)
        self.register_buffer("B_stack", B_stack.to(device).contiguous(), persistent=False)
        self.H = nn.Parameter(A.new_zeros(heads, rank, rank, device=device))
        self.s = nn.Parameter(A.new_ones(heads, device=device))
        self.subset: _Subset | None = None

    @property
    def A(self) -> Tensor:
        """Return a view of the A_i, (heads, r, in)."""
        return self.A_stack.view(self.heads, self.rank, -1)

    @property
    def B(self) -> Tensor:
        """Return a view of the B_i, (heads, out, r)."""
        return self.B_stack.view(-1, self.heads, self.rank).transpose(0, 1)

    def set_bases(self, B: Tensor, A: Tensor) -> None:
        """Replace the bases by others of the same shapes."""
        with torch.no_grad():
            self.B_stack.copy_(side_by_side(B))
            self.A_stack.copy_(A.flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        return multihead_linear(x, self.base, self.base.weight, [self._heads()], self.form)

    def _heads(self) -> "Heads":
        return Heads(self.B_stack, self.A_stack, self.H, self.s, self.subset)

    def head_inputs(self, x: Tensor) -> Tensor:
        """Return what the heads are applied to, without a gradient, for inputs x of the layer."""
        return x

    def delta_weight(self) -> Tensor:
        """Return sum_i s_i B_i H_i A_i, (out, in), with the current values."""
        return self._heads().delta_weight()

    def train_heads(self, heads: Sequence[int]) -> None:
        """Train only these heads' H and s from now on."""
        self.train_all_heads()
        self.H.requires_grad_(False)
        self.s.requires_grad_(False)
        self.subset = _Subset(self, heads)

    def train_all_heads(self) -> None:
        """Undo `train_heads`: train H and s of all heads again, with the values before it."""
        self.subset = None
        self.H.requires_grad_(True)
        self.s.requires_grad_(True)

    def trained_heads(self) -> list[int]:
        """Return the heads that are trained now, in ascending order."""
        return list(range(len(self.H))) if self.subset is None else self.subset.heads

    def products(self) -> Tensor:
        """Return s_i H_i of the heads that are trained now, (K, r, r), for the upload."""
        source = self.subset or self
        return _products(source.H, source.s).detach()


class Heads(NamedTuple):
    """The tensors of one layer's heads.

    RAVAN's computation is in this class and the two functions below, which `MultiHeadLinear` and
    the layer for PEFT (peft/layer.py) share.
    """

    B_stack: Tensor  # (out, heads * r)
    A_stack: Tensor  # (heads * r, in)
    H: Tensor  # (heads, r, r), or (clients * heads, r, r)
    s: Tensor  # (heads,), or (clients * heads,)
    subset: "_Subset | None" = None  # the heads that are trained, if not all

    def cores(self) -> Tensor:
        """Return s_i H_i of all heads, (heads, r, r)."""
        if self.subset is None:
            return _products(self.H, self.s)
        return self.subset.joined(_products(self.subset.H, self.subset.s), self._constants())

    def delta_weight(self) -> Tensor:
        """Return sum_i s_i B_i H_i A_i, (out, in)."""
        A = self.A_stack.view(*self.H.shape[:2], -1)
        return self.B_stack @ torch.bmm(self.cores(), A).flatten(0, 1)

    def apply(self, x: Tensor) -> Tensor:
        """Return sum_i s_i B_i H_i A_i x for x (..., in), in the factored form."""
        heads = len(self.A_stack) // self.H.shape[-1]
        clients = len(self.H) // heads
        if not autocasts(x):
            x = x.to(self.A_stack.dtype)
        A = cast_once(self.A_stack, x)
        rank = len(A) // heads  # of the kept copy, which may have zeros beyond r
        u = F.linear(x, A).view(clients, -1, heads, rank)
        v = self._apply_cores(u.transpose(1, 2).flatten(0, 1))  # (clients * heads, tokens, r)
        v = v.view(clients, heads, -1, rank).transpose(1, 2).reshape(*x.shape[:-1], heads * rank)
        return F.linear(v, cast_once(self.B_stack, v))

    def _apply_cores(self, u: Tensor) -> Tensor:
        """Return s_i H_i u_i for all heads and tokens, (heads, tokens, r).

        Autograd keeps only the trained heads' part of u. `index_copy` in place of `joined` would
        keep its source, too.
        """
        if self.subset is None:
            return _apply(u, _products(self.H, self.s))
        u_train, u_frozen = (u.index_select(0, i) for i in (self.subset.index, self.subset.others))
        trained = _apply(u_train, _products(self.subset.H, self.subset.s))
        return self.subset.joined(trained, _apply(u_frozen, self._constants()))

    def _constants(self) -> Tensor:
        """Return s_i H_i of the heads that are not trained."""
        assert self.subset is not None
        frozen = self.subset.others
        return _products(self.H.detach()[frozen], self.s.detach()[frozen])


def multihead_linear(
    x: Tensor, base: nn.Module, weight: Tensor, adapters: Sequence[Heads], form: str = "auto"
) -> Tensor:
    """Return W x + b + sum_i s_i B_i H_i A_i x, computed in the cheaper form.

    Args:
        x: the input, (..., in).
        base: the frozen layer that computes W x + b.
        weight: its W as (out, in); a layer may keep it transposed.
        adapters: the heads of one adapter or of several.
        form: "merged", "factored", or "auto".

    Returns:
        The output, (..., out).
    """
    bias: Tensor | None = base.bias  # type: ignore[assignment]
    if len(adapters) == 1 and merges(x, weight, bias, adapters[0], form):
        B, A, subset = adapters[0].B_stack, adapters[0].A_stack, adapters[0].subset
        trained = None if subset is None else subset.index
        weight = weight.to(x.dtype)  # it may be kept in 16 bits
        inputs = x, weight, bias, B, adapters[0].cores(), A, trained
        return cast(Tensor, MergedLinear.apply(*inputs))  # type: ignore[no-untyped-call]
    y: Tensor = base(x)
    for heads in adapters:
        y = y + heads.apply(x).to(y.dtype)
    return y


def merges(x: Tensor, weight: Tensor, bias: Tensor | None, heads: Heads, form: str) -> bool:
    """Return whether to use the merged form: if it keeps small updates, and is cheaper."""
    if weight.requires_grad or (bias is not None and bias.requires_grad):
        return False  # as in Fed-SB's first round; the merged form needs constants
    count, rank, _ = heads.H.shape
    if count * rank > len(heads.A_stack):
        return False  # several clients share no merged weight
    if form != "auto":
        return form == "merged"
    if x.dtype != heads.A_stack.dtype or not keeps_small_updates(weight, x):
        return False
    trained = count if heads.subset is None else len(heads.subset.heads)
    if not torch.is_grad_enabled():
        trained = 0
    shape = (x.numel() // x.shape[-1], *weight.shape, count, trained, rank)
    return merged_cost(*shape) < factored_cost(*shape)


class _Subset(nn.Module):
    """The trained heads of a layer: copies of their H and s as parameters."""

    index: Tensor  # (K,): the trained heads
    others: Tensor  # (heads - K,)
    position: Tensor  # (heads,): the position of each head in [index, others]

    def __init__(self, layer: MultiHeadLinear, heads: Sequence[int]) -> None:
        super().__init__()
        self.heads = sorted(heads)
        chosen, total = set(self.heads), len(layer.H)
        order = [*self.heads, *(i for i in range(total) if i not in chosen)]
        for name, values in {
            "index": self.heads,
            "others": order[len(heads) :],
            "position": sorted(range(total), key=order.__getitem__),
        }.items():
            tensor = torch.tensor(values, dtype=torch.long, device=layer.H.device)
            self.register_buffer(name, tensor, persistent=False)
        self.H = nn.Parameter(layer.H.detach()[self.index])
        self.s = nn.Parameter(layer.s.detach()[self.index])

    def joined(self, trained: Tensor, frozen: Tensor) -> Tensor:
        """Return the results for both kinds of heads, in the order of the heads."""
        return torch.cat([trained, frozen]).index_select(0, self.position)


def _products(H: Tensor, s: Tensor) -> Tensor:
    """Return s_i H_i, (heads, r, r)."""
    return s[:, None, None] * H


def _apply(u: Tensor, cores: Tensor) -> Tensor:
    """Return C_i u_i for heads and tokens, (heads, tokens, r); u may have zeros beyond r."""
    if zeros := u.shape[-1] - cores.shape[-1]:
        cores = F.pad(cores, (0, zeros, 0, zeros))
    return torch.bmm(u, cores.to(u.dtype).mT)


def side_by_side(B: Tensor) -> Tensor:
    """Return B (heads, out, r) side by side, (out, heads * r)."""
    return B.transpose(0, 1).flatten(1)
