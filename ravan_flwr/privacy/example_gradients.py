"""Collect the gradients of each example's own loss from one backward pass; clip, sum, noise them.

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
from ravan_flwr.privacy.account import StepNoise
from ravan_flwr.privacy.mechanism import BELOW, gaussian

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
            own = [] if rule is None else [p for p in ruled(module) if self._is_trained(p)]
            if rule is not None and own:
                self._layers.append((module, rule))
                covered.update(map(id, own))
        self.without_rule = [p for p in self.parameters if id(p) not in covered]
        self._gradients: list[Tensor | None] = []

    def of(self, loss: Callable[[], Tensor], sizes: Tensor) -> list[Tensor]:
        """Compute them, (examples, *shape) each, in the order of the parameters.

        `loss` computes a mean over all things, tokens or examples, of which each example has as
        many as `sizes` says. What is found is the gradient of the mean over an example's own.
        """
        self._gradients = [None] * len(self.parameters)
        weights = torch.where(sizes > 0, sizes.sum() / sizes.clamp(min=1), 0.0)
        with self.tapped(self._collector(weights)):
            loss().backward()
        results, self._gradients = self._gradients, []
        return [
            parameter.new_zeros(len(sizes), *parameter.shape) if gradients is None else gradients
            for parameter, gradients in zip(self.parameters, results, strict=True)
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
                for parameter, gradients in rule(layer, x, g, self._is_trained):
                    self._add(parameter, gradients)

        return collect

    def _add(self, parameter: Tensor, gradients: Tensor) -> None:
        """Keep gradients; of a layer that is used twice both count."""
        place = self._place[id(parameter)]
        total = self._gradients[place]
        self._gradients[place] = gradients if total is None else total + gradients

    def _is_trained(self, parameter: Tensor) -> bool:
        return id(parameter) in self._place


def check_trained(network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError for what gradients by example are not known of, or do not exist of."""
    missing = {id(p) for p in ExampleGradients(network, parameters).without_rule}
    for name, module in network.named_modules():
        if any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
            names = ", ".join(kind.__name__ for kind in RULES)
            raise ValueError(
                f"privacy = 'example': what is trained has a {type(module).__name__}, {name}, of "
                "which no rule for the gradients of single examples is known, expected "
                f"{names}; set classifier=frozen, or choose another model or method"
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
    single = [a[0].cpu().double() for a in alone]  # MPS knows no float64
    batch = [b[0].cpu().double() for b in together]
    if not any(all(bool(grad.isfinite().all()) for grad in side) for side in (single, batch)):
        raise ValueError(
            "privacy = 'example': got gradients that are not numbers from the untrained model, so "
            "that it cannot be seen whether examples depend on each other, expected finite ones; "
            "choose another model"
        )
    size = math.hypot(*(float(a.norm()) for a in single))
    off = math.hypot(*(float((a - b).norm()) for a, b in zip(single, batch, strict=True)))
    # Where one side alone is finite, `off` is not.
    if not off <= _CLOSE * size + torch.finfo(torch.float32).eps:
        raise ValueError(
            "privacy = 'example': the gradient of an example depends on the other examples of its "
            "batch, expected a model that works on each by itself; choose another model"
        )


# The gradient of a step. With g_j the gradient of example j's own loss by all that the client
# trains, in one vector, S the examples that a Poisson draw of rate q chose of the client's n, C the
# clip norm and z the noise multiplier, a step has in its place (DP-SGD; Abadi et al., 2016)
#
#     (sum over j in S of g_j min(1, C / |g_j|)  +  N(0, z^2 C^2 I)) / (q n)
#
# q n is how many examples are *expected*. Divided by how many were drawn, the sum of the others
# would depend on whether one was. A draw that is empty releases noise alone. What comes after, the
# client's optimiser, its decay and its pull, works on what was released.
#
# An example whose gradient is not finite counts as zero: it would be the only one that is seen.


class ClippedExamples:
    """Keep the sum of clipped gradients; no example moves it by more than the norm."""

    def __init__(self, parameters: Sequence[Tensor], noise: StepNoise) -> None:
        self.noise = noise
        self.sums = [
            torch.zeros(p.shape, dtype=torch.float64, device=_exact(p)) for p in parameters
        ]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add those of some examples, (examples, *shape) for each parameter."""
        norms = joint_norms(gradients)
        sound = norms.isfinite()
        factors = (BELOW * self.noise.norm / norms).clamp(max=1.0)
        factors = torch.where(sound & (norms > 0), factors, sound.double())
        clipped = []
        for total, grad in zip(self.sums, gradients, strict=True):
            rows = torch.where(sound[:, None].to(grad.device), grad.flatten(1), 0.0)
            rows = rows.to(total.device)
            clipped.append((factors.to(total.device) @ rows.double()).view_as(total))
        for total, part in zip(self.sums, clipped, strict=True):  # all, or none after an error
            total.add_(part)

    def release(self, expected: float) -> list[Tensor]:
        """Return the gradient of the step, noise included, in float32; the sum begins anew."""
        scale = self.noise.multiplier * self.noise.norm
        released = []
        for total in self.sums:
            noised = total + gaussian(total.shape, scale).to(total.device)
            released.append((noised / expected).float())
            total.zero_()
        return released


def joint_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Compute each example's norm over all parameters, in float64."""
    squares = [grad.flatten(1).to(_exact(grad)).double().square().sum(1) for grad in gradients]
    return torch.stack(squares).sum(0).sqrt()


def step_noise_norm(numbers: int, noise: StepNoise, expected: float) -> float:
    """Return the norm of the noise in a step's gradient of so many numbers."""
    return noise.multiplier * noise.norm * math.sqrt(numbers) / expected


def _exact(tensor: Tensor) -> torch.device:
    """Choose where to sum up: on the tensor's device, unless that knows no float64."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
