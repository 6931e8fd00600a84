"""Compute per-example gradients of a layer's parameters, without a loop over examples.

One backward pass over a batch gives all that is needed: a layer's inputs x_t and the gradients g_t
of its outputs. Those of an example's tokens t depend on that example alone. With sums over these
tokens, the gradients of the example's loss are

    y = W x + b                     dW = sum_t g_t x_t^T,             db = sum_t g_t
    y = W x + scale B A x           dB = scale sum_t g_t (A x_t)^T
                                    dA = scale sum_t (B^T g_t) x_t^T
    y = W x + sum_i s_i B_i H_i A_i x
        G_i = sum_t (B_i^T g_t) (A_i x_t)^T,    dH_i = s_i G_i,    ds_i = <H_i, G_i>

So an example's gradient of a core needs only products with the layer's factors, and has r^2
numbers. It does not depend on the form, factored or merged, in which the layer was computed. All
computations are in float32.

`RULES` has a rule for each supported kind of layer. A layer without a rule cannot be trained with
example-level privacy.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ravan_flwr.adapters.lora import LoRALinear
from ravan_flwr.adapters.multihead import MultiHeadLinear
from ravan_flwr.adapters.stored import StoredLinear

IsTrained = Callable[[Tensor], bool]  # whether a parameter is trained
Gradients = Iterator[tuple[Tensor, Tensor]]  # parameters with their gradients, (examples, *shape)


# Yields the gradients of a layer's own parameters, from its input x (examples, tokens, in) and the
# gradient of its output (examples, tokens, out).
Rule = Callable[[Any, Tensor, Tensor, IsTrained], Gradients]


def gradient_rule(layer: nn.Module) -> Rule | None:
    """Return the rule for a layer; None if there is none."""
    if isinstance(layer, nn.Linear) and type(layer) not in (nn.Linear, StoredLinear):
        return None  # an unknown subclass may compute anything
    return next((rule for layer_type, rule in RULES.items() if isinstance(layer, layer_type)), None)


def ruled_parameters(layer: nn.Module) -> list[Tensor]:
    """Return the parameters that the rule of a layer covers."""
    source = getattr(layer, "subset", None) or layer  # the trained heads of a multi-head layer
    return list(source.parameters(recurse=False))


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
