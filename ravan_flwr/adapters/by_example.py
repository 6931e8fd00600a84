"""Compute the gradients of each example's own loss in a layer, without a loop over examples.

One backward pass over a batch has all that is needed: a layer's inputs x_t and the gradients g_t of
its outputs, of which an example's tokens t depend on that example alone. Summed over these tokens,

    y = W x + b                     dW = sum_t g_t x_t^T,             db = sum_t g_t
    y = W x + scale B A x           dB = scale sum_t g_t (A x_t)^T
                                    dA = scale sum_t (B^T g_t) x_t^T
    y = W x + sum_i s_i B_i H_i A_i x
        G_i = sum_t (B_i^T g_t) (A_i x_t)^T,    dH_i = s_i G_i,    ds_i = <H_i, G_i>

So an example's gradient of a core takes what the layer's factors are multiplied with anyway, and
has r^2 numbers. It is the same in whatever form the layer was computed. All of it is in float32.

`RULES` says for which layers this is known. One that is not among them cannot be trained with
privacy of each example.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.adapters.lora import LoRALinear
from ravan_flwr.adapters.multihead import MultiHeadLinear
from ravan_flwr.adapters.stored import StoredLinear

IsTrained = Callable[[Tensor], bool]  # tells of a parameter whether it is trained
Gradients = Iterator[tuple[Tensor, Tensor]]  # of a parameter with its gradients, (examples, *shape)


# Yields gradients of a layer's own parameters. x is (examples, tokens, in), the gradient of the
# output (examples, tokens, out).
Rule = Callable[[Any, Tensor, Tensor, IsTrained], Gradients]


def rule_of(layer: nn.Module) -> Rule | None:
    """Find the rule for a layer; None if there is none."""
    if isinstance(layer, nn.Linear) and type(layer) not in (nn.Linear, StoredLinear):
        return None  # it may compute anything
    return next((rule for kind, rule in RULES.items() if isinstance(layer, kind)), None)


def ruled(layer: nn.Module) -> list[Tensor]:
    """List the parameters that the rule of a layer is for."""
    own = getattr(layer, "subset", None) or layer  # of a multi-head layer's trained heads
    return list(own.parameters(recurse=False))


def _linear(layer: nn.Linear, x: Tensor, g: Tensor, is_trained: IsTrained) -> Gradients:
    if is_trained(layer.weight):
        yield layer.weight, g.mT @ x
    if layer.bias is not None and is_trained(layer.bias):
        yield layer.bias, g.sum(1)


def _lora(layer: LoRALinear, x: Tensor, g: Tensor, is_trained: IsTrained) -> Gradients:
    B, A, scaled = layer.B.detach().float(), layer.A.detach().float(), layer.scale * g
    if is_trained(layer.B):
        yield layer.B, scaled.mT @ (x @ A.mT)
    if is_trained(layer.A):
        yield layer.A, (scaled @ B).mT @ x


def _heads(layer: MultiHeadLinear, x: Tensor, g: Tensor, is_trained: IsTrained) -> Gradients:
    trained = layer.subset or layer
    A, B = layer.A.float(), layer.B.float()
    if layer.subset is not None:
        A, B = A[layer.subset.index], B[layer.subset.index]
    sides = *x.shape[:2], len(A), layer.rank
    u = (x @ A.flatten(0, 1).mT).view(sides)  # A_i x of the trained heads
    v = (g @ B.transpose(0, 1).flatten(1)).view(sides)  # B_i^T g
    G = torch.einsum("ntka,ntkb->nkab", v, u)
    if is_trained(trained.s):
        yield trained.s, torch.einsum("nkab,kab->nk", G, trained.H.detach())
    if is_trained(trained.H):
        yield trained.H, trained.s.detach()[:, None, None] * G


RULES: dict[type[nn.Module], Rule] = {
    MultiHeadLinear: _heads,
    LoRALinear: _lora,
    nn.Linear: _linear,
}
