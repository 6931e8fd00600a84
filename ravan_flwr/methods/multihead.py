"""Share the code of methods whose adapters are multi-head layers, and choose their heads.

A client that trains K heads scores all heads, and takes the K with the highest scores (section
3.2). Scores are (layers, heads):

- `random`: uniform draws.
- `weight`: the Frobenius norm of s_i H_i, relative to the norm of the layer's weight. All are zero
  in round 1; ties break at random.
- `gradient`: the Frobenius norm of the loss's gradient with respect to s_i H_i, on one mini-batch
  without an update.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import Layer, MultiHeadLinear, make_bases
from ravan_flwr.adapters.sketch import watch_gradients
from ravan_flwr.adapters.stored import weight_norm
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.methods.tensors import probe


class MultiHeadMethod(Method[MultiHeadLinear]):
    """Adapt every layer by cores between frozen bases that both sides derive from the seed."""

    rank: int
    heads = 1
    init = "normal"  # the scheme of the bases
    trains_scales = False
    layer_class: type[MultiHeadLinear] = MultiHeadLinear

    def __init__(self, settings: Settings, layers: Sequence[Layer], size: int) -> None:
        super().__init__(settings, layers, size)
        self.side = min(min(layer.out_features, layer.in_features) for layer in self.layers)

    def adapt(self, layer: Layer, linear: nn.Linear) -> MultiHeadLinear:
        out, inside = layer.out_features, layer.in_features
        if linear.weight.is_meta:  # the command `plan` needs shapes only
            B = torch.empty(self.heads, out, self.rank, device="meta")
            A = torch.empty(self.heads, self.rank, inside, device="meta")
        else:
            B, A = make_bases(
                self.init, heads=self.heads, rank=self.rank, out_features=out, in_features=inside,
                seed=self.settings.seed, layer=layer.name,
            )  # fmt: skip
        return self.layer_class(linear, B, A, self.settings.layer_form)

    def lora_factors(self, adapter: MultiHeadLinear) -> tuple[Tensor, Tensor] | None:
        with torch.no_grad():
            B = torch.cat(list(adapter.s[:, None, None] * (adapter.B @ adapter.H)), dim=1)
        return B, adapter.A_stack

    def fingerprint(self, adapters: Sequence[MultiHeadLinear]) -> list[float]:
        return probe([(adapter.B, adapter.A) for adapter in adapters])


SCORINGS = ("random", "weight", "gradient")


def score_heads(
    scoring: str,
    layers: Sequence[MultiHeadLinear],
    random: torch.Generator,
    backward: Callable[..., object],
) -> Tensor:
    """Return the scores of the heads, (layers, heads); `backward` is that of `Method.choose`."""
    if scoring == "random":
        return torch.rand(len(layers), layers[0].heads, generator=random)
    if scoring == "weight":  # relative to the norm of the layer's own weight
        changes = [layer.products().norm(dim=(1, 2)) / weight_norm(layer.base) for layer in layers]
        return torch.stack(changes).cpu()
    # The gradient with respect to s_i H_i is B_i^T (dL/dy)^T x A_i^T. Each layer's is computed
    # during the backward pass, and summed over the parts of the batch.
    gradients = [torch.zeros_like(layer.H, requires_grad=False) for layer in layers]
    with ExitStack() as stack:
        for position, layer in enumerate(layers):

            def add_gradient(
                x: Tensor, gy: Tensor, layer: MultiHeadLinear = layer, at: int = position
            ) -> None:
                full = gy.T @ layer.head_inputs(x)  # (out, in)
                gradients[at] += layer.B.mT @ full @ layer.A.mT

            stack.enter_context(watch_gradients(layer, add_gradient))
        backward(gradients)
    return torch.stack([gradient.norm(dim=(1, 2)) for gradient in gradients]).cpu()


def best_heads(
    scores: Tensor, number: int, selection: str, random: torch.Generator | None
) -> list[list[int]]:
    """Return the `number` best heads of each layer, or the `number` * layers best of all layers.

    Scores of different layers are comparable. All bases have the same norms, so a gradient norm is
    the loss's decrease per unit of change of a head in any layer. A weight score is relative to the
    layer's weight.
    """
    layers, heads = scores.shape
    if selection == "layer":
        return [_top(row, number, random) for row in scores]
    chosen = _top(scores.flatten(), number * layers, random)
    return [[i % heads for i in chosen if i // heads == layer] for layer in range(layers)]


def selection_probabilities(scores: Tensor, number: int) -> Tensor:
    """Return the probability that each head is among its layer's `number` best, random in ties."""
    smallest = scores.sort(dim=1, descending=True).values[:, number - 1, None]
    above, tied = scores > smallest, scores == smallest
    left = number - above.sum(1, keepdim=True)
    return torch.where(above, 1.0, torch.where(tied, left / tied.sum(1, keepdim=True), 0.0))


def _top(scores: Tensor, number: int, random: torch.Generator | None) -> list[int]:
    """Return the positions of the highest scores, ascending; `random` breaks ties."""
    order = torch.randperm(len(scores), generator=random)
    ranking = scores[order].argsort(descending=True, stable=True)
    return sorted(order[ranking[:number]].tolist())
