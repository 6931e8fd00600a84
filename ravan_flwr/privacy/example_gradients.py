"""Collect the gradients of each example's own loss from one backward pass over a batch.

The layers that are trained are tapped: each keeps its input in the forward pass, and when the
gradient of its output comes in the backward pass, its rule (adapters/by_example.py) makes of both
the gradients of every example. The parameters themselves get none, so that nothing is computed
twice.

This is right only where an example's outputs follow from that example alone, and where the first
dimension of what a layer reads runs over the examples, one after the other. `check_trained` refuses
layers without a rule and normalisations over a batch; `check_apart` compares an example that has
company with the same example by itself.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ravan_flwr.adapters.by_example import RULES, Rule, rule_of, ruled

Take = Callable[[nn.Module, Rule, Tensor, Tensor], None]  # with input and gradient of a layer

_CLOSE = 1e-3  # of an example's gradient by itself, how far off it may be in company


class ExampleGradients:
    """Compute the gradients of each example's own loss by these parameters of a network."""

    def __init__(self, network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.network, self.parameters = network, list(parameters)
        self._place = {id(parameter): place for place, parameter in enumerate(self.parameters)}
        self._layers: list[tuple[nn.Module, Rule]] = []
        covered: set[int] = set()
        for module in network.modules():
            rule = rule_of(module)
            own = [] if rule is None else [p for p in ruled(module) if self._wanted(p)]
            if rule is not None and own:
                self._layers.append((module, rule))
                covered.update(map(id, own))
        self.without_rule = [p for p in self.parameters if id(p) not in covered]
        self._found: list[Tensor | None] = []

    def of(self, loss: Callable[[], Tensor], sizes: Tensor) -> list[Tensor]:
        """Compute them, (examples, *shape) each, in the order of the parameters.

        `loss` computes a mean over all things, tokens or examples, of which each example has as
        many as `sizes` says. What is found is the gradient of the mean over an example's own.
        """
        self._found = [None] * len(self.parameters)
        weights = torch.where(sizes > 0, sizes.sum() / sizes.clamp(min=1), 0.0)
        with self.tapped(self._collector(weights)):
            loss().backward()
        found, self._found = self._found, []
        return [
            parameter.new_zeros(len(sizes), *parameter.shape) if gradients is None else gradients
            for parameter, gradients in zip(self.parameters, found, strict=True)
        ]

    @contextmanager
    def tapped(
        self, take: Take | None = None, read: Callable[[Tensor], object] | None = None
    ) -> Iterator[None]:
        """Let each layer hand over what it reads, and that with the gradient of its output."""
        before = [parameter.requires_grad for parameter in self.parameters]
        taps = [self._tap(layer, rule, take, read) for layer, rule in self._layers]
        try:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for tap in taps:
                tap.remove()
            for parameter, trained in zip(self.parameters, before, strict=True):
                parameter.requires_grad_(trained)

    def _tap(
        self,
        layer: nn.Module,
        rule: Rule,
        take: Take | None,
        read: Callable[[Tensor], object] | None,
    ) -> torch.utils.hooks.RemovableHandle:
        def tap(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:  # nothing before it is trained, and nothing in it now
                output.requires_grad_()
            x = inputs[0].detach()
            if read is not None:
                read(x)
            if take is not None:
                # Of what gradient checkpointing computes again this is never called.
                output.register_hook(lambda g: take(layer, rule, x, g))

        return layer.register_forward_hook(tap)

    def _collector(self, weights: Tensor) -> Take:
        def collect(layer: nn.Module, rule: Rule, x: Tensor, g: Tensor) -> None:
            number = len(weights)
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                x, g = (t.reshape(number, -1, t.shape[-1]).float() for t in (x, g))
                g = g * weights.to(g)[:, None, None]
                for parameter, gradients in rule(layer, x, g, self._wanted):
                    self._add(parameter, gradients)

        return collect

    def _add(self, parameter: Tensor, gradients: Tensor) -> None:
        """Keep gradients; of a layer that is used twice both count."""
        place = self._place[id(parameter)]
        there = self._found[place]
        self._found[place] = gradients if there is None else there + gradients

    def _wanted(self, parameter: Tensor) -> bool:
        return id(parameter) in self._place


def check_trained(network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError for what gradients by example are not known of, or do not exist of."""
    missing = {id(p) for p in ExampleGradients(network, parameters).without_rule}
    for name, module in network.named_modules():
        if any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
            known = ", ".join(kind.__name__ for kind in RULES)
            raise ValueError(
                f"privacy = 'example': what is trained has a {type(module).__name__}, {name}, of "
                "which no rule for the gradients of single examples is known, expected "
                f"{known}; set classifier=frozen, or choose another model or method"
            )
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise ValueError(
                f"privacy = 'example': the model has a {type(module).__name__}, {name}, which "
                "mixes the examples of a batch, expected layers that work on each by itself; "
                "choose another model"
            )


def check_apart(alone: Sequence[Tensor], together: Sequence[Tensor]) -> None:
    """Raise ValueError unless an example's gradients are the same by itself and in a batch.

    Both are what `ExampleGradients.of` returned; the example is the first of the batch, and one
    that nobody has: the server hears the error.
    """
    mine = [a[0].cpu().double() for a in alone]  # MPS knows no float64
    others = [b[0].cpu().double() for b in together]
    if not any(all(bool(one.isfinite().all()) for one in side) for side in (mine, others)):
        raise ValueError(
            "privacy = 'example': got gradients that are not numbers from the untrained model, so "
            "that nobody can see whether examples depend on each other, expected finite ones; "
            "choose another model"
        )
    size = math.hypot(*(float(a.norm()) for a in mine))
    off = math.hypot(*(float((a - b).norm()) for a, b in zip(mine, others, strict=True)))
    # Where one side alone is finite, `off` is not.
    if not off <= _CLOSE * size + torch.finfo(torch.float32).eps:
        raise ValueError(
            "privacy = 'example': the gradient of an example depends on the other examples of its "
            "batch, expected a model that works on each by itself; choose another model"
        )
