"""RAVAN's adapted layer: y = W x + b + sum_i s_i B_i H_i A_i x (section 3).

W, b, B and A are frozen; H_i (r, r) and s_i are trained. One head with s = 1 is LoRA-XS,
and Fed-SB up to its initialisation.

A client that cannot afford all heads trains some of them (`train_heads`). The others are
then folded, once, into an effective weight: they stay in the forward pass, at no cost, and
have neither gradient nor optimiser state, because they are not parameters any more.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class MultiHeadLinear(nn.Module):
    """A frozen linear layer with `heads` trainable cores between frozen bases.

    `B` is (heads, out, r), `A` is (heads, r, in); parameters `H` (heads, r, r), zero at
    first, and `s` (heads,), one at first.
    """

    A_stack: Tensor  # (heads * r, in): all A_i on top of each other, so that one product does
    B_stack: Tensor  # (out, heads * r): all B_i side by side

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor) -> None:
        super().__init__()
        heads, rank, in_features = A.shape
        expected = (heads, base.out_features, rank)
        if B.shape != expected or in_features != base.in_features:
            raise ValueError(
                f"bases of a {base.out_features} x {base.in_features} layer: got B "
                f"{tuple(B.shape)} and A {tuple(A.shape)}, expected B (heads, "
                f"{base.out_features}, r) and A (heads, r, {base.in_features}); "
                "make them with make_bases"
            )
        self.base = base.requires_grad_(False)
        self.heads, self.rank = heads, rank
        device = base.weight.device
        A_stack, B_stack = A.reshape(heads * rank, in_features), B.transpose(0, 1).flatten(1)
        self.register_buffer("A_stack", A_stack.to(device).contiguous(), persistent=False)
        self.register_buffer("B_stack", B_stack.to(device).contiguous(), persistent=False)
        self.H = nn.Parameter(A.new_zeros(heads, rank, rank, device=device))
        self.s = nn.Parameter(A.new_ones(heads, device=device))
        self.subset: _Subset | None = None

    @property
    def A(self) -> Tensor:
        """(heads, r, in)"""
        return self.A_stack.view(self.heads, self.rank, -1)

    @property
    def B(self) -> Tensor:
        """(heads, out, r)"""
        return self.B_stack.view(-1, self.heads, self.rank).transpose(0, 1)

    def set_bases(self, B: Tensor, A: Tensor) -> None:
        """Take other bases of the same shapes."""
        with torch.no_grad():
            self.B_stack.copy_(_side_by_side(B))
            self.A_stack.copy_(A.flatten(0, 1))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor
        if self.subset is not None:
            y = self.subset(x, self.base.bias)
        else:
            y = self.base(x) + _low_rank(x, self.A_stack, _cores(self.H, self.s), self.B_stack)
        return y

    def delta_weight(self) -> Tensor:
        """sum_i s_i B_i H_i A_i, (out, in), as the layer computes it now."""
        if self.subset is not None:
            return self.subset.effective_weight() - self.base.weight
        return _delta(self.B_stack, _cores(self.H, self.s), self.A_stack)

    def train_heads(self, heads: Sequence[int]) -> None:
        """From now on train these heads alone, by their H and s."""
        self.train_all_heads()
        self.H.requires_grad_(False)
        self.s.requires_grad_(False)
        self.subset = _Subset(self, heads)

    def train_all_heads(self) -> None:
        """Undo `train_heads`: H and s are the parameters again, with the values they had."""
        self.subset = None
        self.H.requires_grad_(True)
        self.s.requires_grad_(True)

    def trainable(self) -> list[nn.Parameter]:
        """What an optimiser should be given."""
        return [p for p in self.parameters() if p.requires_grad]

    def trained_heads(self) -> list[int]:
        """The heads that are trained now, in ascending order."""
        return list(range(self.heads)) if self.subset is None else self.subset.chosen

    def products(self) -> Tensor:
        """s_i H_i of the heads that are trained now, (K, r, r): what a client uploads."""
        source = self.subset or self
        return _cores(source.H, source.s).detach()


class _Subset(nn.Module):
    """Copies of some heads as parameters, over a weight that all other heads are folded into."""

    A_stack: Tensor
    B_stack: Tensor
    folded: Tensor

    def __init__(self, layer: MultiHeadLinear, heads: Sequence[int]) -> None:
        super().__init__()
        device = layer.H.device
        self.chosen = sorted(heads)
        chosen = torch.tensor(self.chosen, dtype=torch.long, device=device)
        frozen = torch.ones(layer.heads, dtype=torch.bool, device=device)
        frozen[chosen] = False
        self.H = nn.Parameter(layer.H.detach()[chosen])
        self.s = nn.Parameter(layer.s.detach()[chosen])
        with torch.no_grad():
            A_stack, B_stack = layer.A[chosen].flatten(0, 1), _side_by_side(layer.B[chosen])
            cores = _cores(layer.H[frozen], layer.s[frozen])
            delta = _delta(_side_by_side(layer.B[frozen]), cores, layer.A[frozen].flatten(0, 1))
            folded = layer.base.weight + delta if cores.any() else layer.base.weight
        self.register_buffer("A_stack", A_stack, persistent=False)
        self.register_buffer("B_stack", B_stack, persistent=False)
        self.register_buffer("folded", folded.detach(), persistent=False)

    def forward(self, x: Tensor, bias: Tensor | None) -> Tensor:
        y = F.linear(x, self.folded, bias)
        if not len(self.H):
            return y
        return y + _low_rank(x, self.A_stack, _cores(self.H, self.s), self.B_stack)

    def effective_weight(self) -> Tensor:
        return self.folded + _delta(self.B_stack, _cores(self.H, self.s), self.A_stack)


def _cores(H: Tensor, s: Tensor) -> Tensor:
    """s_i H_i, (heads, r, r)"""
    return s[:, None, None] * H


def _side_by_side(B: Tensor) -> Tensor:
    """(heads, out, r) -> (out, heads * r)"""
    return B.transpose(0, 1).flatten(1)


def _low_rank(x: Tensor, A_stack: Tensor, cores: Tensor, B_stack: Tensor) -> Tensor:
    """sum_i B_i C_i A_i x, without a loop over the heads."""
    heads, rank, _ = cores.shape
    u = F.linear(x, A_stack).view(-1, heads, rank).transpose(0, 1)  # (heads, tokens, r)
    v = torch.bmm(u, cores.to(u.dtype).transpose(1, 2))  # (heads, tokens, r)
    v = v.transpose(0, 1).reshape(*x.shape[:-1], heads * rank)
    return F.linear(v, B_stack)


def _delta(B_stack: Tensor, cores: Tensor, A_stack: Tensor) -> Tensor:
    """sum_i B_i C_i A_i, (out, in)"""
    heads, rank, _ = cores.shape
    CA = torch.bmm(cores, A_stack.view(heads, rank, A_stack.shape[1]))  # (heads, r, in)
    return B_stack @ CA.flatten(0, 1)
