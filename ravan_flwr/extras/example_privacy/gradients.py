"""Compute the gradients of each example's own loss in one backward pass; clip, sum, noise them.

The trained layers have hooks. A layer's hook keeps its input in the forward pass. When the backward
pass has the gradient of its output, its rule (rules.py) computes every example's
gradients from both. The parameters themselves get no gradients, so nothing is computed twice.

This is correct only if an example's outputs depend on that example alone, and if the first
dimension of a layer's input runs over the examples in order. `check_trained` rejects layers without
a rule and normalisations over a batch. `check_independent` compares the gradients of an example in
a batch with those of the same example alone.

Opacus computes the same for layers that it knows (a test compares the two). It refuses layers with
buffers, such as the frozen bases B and A, and has one hook for all parameters of a layer.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from ravan_flwr.extras.example_privacy.rules import RULES, Rule, gradient_rule, ruled_parameters
from ravan_flwr.privacy.mechanism import ROUNDING_MARGIN, gaussian

OnGradient = Callable[[nn.Module, Rule, Tensor, Tensor], None]  # of a layer's input and gradient

_TOLERANCE = 1e-3  # relative difference between an example's gradients alone and in a batch


class ExampleGradients:
    """Compute the gradients of each example's own loss for these parameters of a network."""

    def __init__(self, network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
        self.network, self.parameters = network, list(parameters)
        self._index = {id(parameter): index for index, parameter in enumerate(self.parameters)}
        self._layers: list[tuple[nn.Module, Rule]] = []
        covered: set[int] = set()
        for module in network.modules():
            rule = gradient_rule(module)
            trained_here = (
                [] if rule is None else [p for p in ruled_parameters(module) if self._is_trained(p)]
            )
            if rule is not None and trained_here:
                self._layers.append((module, rule))
                covered.update(map(id, trained_here))
        self.without_rule = [p for p in self.parameters if id(p) not in covered]
        self._gradients: list[Tensor | None] = []

    def of(self, loss: Callable[[], Tensor], sizes: Tensor) -> list[Tensor]:
        """Return the gradients, (examples, *shape) each, in the order of the parameters.

        `loss` computes a mean over items, tokens or examples; `sizes` is the number of items of
        each example. The result is the gradient of the mean over an example's own items.
        """
        self._gradients = [None] * len(self.parameters)
        weights = torch.where(sizes > 0, sizes.sum() / sizes.clamp(min=1), 0.0)
        with self.hooked(self._collector(weights)):
            loss().backward()
        results, self._gradients = self._gradients, []
        return [
            parameter.new_zeros(len(sizes), *parameter.shape) if gradients is None else gradients
            for parameter, gradients in zip(self.parameters, results, strict=True)
        ]

    @contextmanager
    def hooked(
        self,
        on_gradient: OnGradient | None = None,
        on_input: Callable[[Tensor], object] | None = None,
    ) -> Iterator[None]:
        """Register hooks for a `with` block.

        `on_input` gets each trained layer's input, `on_gradient` also the gradient of its output.
        """
        before = [parameter.requires_grad for parameter in self.parameters]
        handles = [
            self._register_hook(layer, rule, on_gradient, on_input) for layer, rule in self._layers
        ]
        try:
            for parameter in self.parameters:
                parameter.requires_grad_(False)
            yield
        finally:
            for handle in handles:
                handle.remove()
            for parameter, trained in zip(self.parameters, before, strict=True):
                parameter.requires_grad_(trained)

    def num_bytes(self, examples: int) -> int:
        """Return the bytes of the gradients of so many examples, and of their sums."""
        # The gradients of each example in float32, and the sums of the clipped ones in float64.
        # Of one parameter at a time there is also a float64 and a float32 copy of its gradients.
        numbers = [parameter.numel() for parameter in self.parameters]
        copies = 12 * examples * max(numbers, default=0)
        return (4 * examples + 8) * sum(numbers) + copies

    def _register_hook(
        self,
        layer: nn.Module,
        rule: Rule,
        on_gradient: OnGradient | None,
        on_input: Callable[[Tensor], object] | None,
    ) -> torch.utils.hooks.RemovableHandle:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            if not output.requires_grad:  # no earlier layer is trained, and its weights not now
                output.requires_grad_()
            x = inputs[0].detach()
            if on_input is not None:
                on_input(x)
            if on_gradient is not None:
                # Never called on outputs that gradient checkpointing recomputes.
                output.register_hook(lambda g: on_gradient(layer, rule, x, g))

        return layer.register_forward_hook(hook)

    def _collector(self, weights: Tensor) -> OnGradient:
        def collect(layer: nn.Module, rule: Rule, x: Tensor, g: Tensor) -> None:
            number = len(weights)
            with torch.no_grad(), torch.autocast(x.device.type, enabled=False):
                x, g = (t.reshape(number, -1, t.shape[-1]).float() for t in (x, g))
                g = g * weights.to(g)[:, None, None]
                for parameter, gradients in rule(layer, x, g, self._is_trained):
                    self._add(parameter, gradients)

        return collect

    def _add(self, parameter: Tensor, gradients: Tensor) -> None:
        """Add to a parameter's gradients; a layer that is used twice adds twice."""
        index = self._index[id(parameter)]
        total = self._gradients[index]
        self._gradients[index] = gradients if total is None else total + gradients

    def _is_trained(self, parameter: Tensor) -> bool:
        return id(parameter) in self._index


def check_trained(network: nn.Module, parameters: Sequence[nn.Parameter]) -> None:
    """Raise ValueError for trained layers without a rule, and for layers that mix examples."""
    missing = {id(p) for p in ExampleGradients(network, parameters).without_rule}
    for name, module in network.named_modules():
        if any(id(parameter) in missing for parameter in module.parameters(recurse=False)):
            names = ", ".join(layer_type.__name__ for layer_type in RULES)
            raise ValueError(
                f"privacy = 'example': a trained layer is a {type(module).__name__}, {name}, "
                "without a rule for the gradients of single examples, expected "
                f"{names}; set classifier=frozen, or choose another model or method"
            )
        if isinstance(module, _NormBase) and module.track_running_stats:
            raise ValueError(
                f"privacy = 'example': the model has a {type(module).__name__}, {name}, which "
                "mixes the examples of a batch, expected layers that work on each by itself; "
                "choose another model"
            )


def check_independent(alone: Sequence[Tensor], together: Sequence[Tensor]) -> None:
    """Raise ValueError unless an example's gradients are the same alone and in a batch.

    Both arguments are results of `ExampleGradients.of`. The example is the first of the batch. It
    must be made up, because the server receives the error.
    """
    single = [a[0].cpu().double() for a in alone]  # MPS has no float64
    batch = [b[0].cpu().double() for b in together]
    if not any(all(bool(grad.isfinite().all()) for grad in side) for side in (single, batch)):
        raise ValueError(
            "privacy = 'example': got gradients from the untrained model that are not finite, so "
            "that the independence of examples cannot be checked, expected finite ones; "
            "choose another model"
        )
    size = math.hypot(*(float(a.norm()) for a in single))
    difference = math.hypot(*(float((a - b).norm()) for a, b in zip(single, batch, strict=True)))
    # If only one of the two is finite, `difference` is not.
    if not difference <= _TOLERANCE * size + torch.finfo(torch.float32).eps:
        raise ValueError(
            "privacy = 'example': the gradient of an example depends on the other examples of its "
            "batch, expected a model that works on each by itself; choose another model"
        )


# The gradient of a step. Let g_j be the gradient of example j's own loss for all parameters that
# the client trains, as one vector. S is a Poisson sample, with rate q, of the client's n examples,
# C the clip norm and z the noise multiplier. A step's gradient is (DP-SGD; Abadi et al., 2016)
#
#     (sum over j in S of g_j min(1, C / |g_j|)  +  N(0, z^2 C^2 I)) / (q n)
#
# q n is the *expected* number of examples. A division by the number in the sample would let each
# example change the weight of all others. An empty sample releases noise only. The optimiser,
# weight decay and proximal term work on the released gradient.
#
# An example whose gradient is not finite counts as zero: else the sum would show that one only.


@dataclass(frozen=True)
class StepNoise:
    """The noise multiplier and the clip norm of private steps."""

    multiplier: float
    norm: float


class ClippedExamples:
    """The sum of clipped gradients; each example's part has at most the clip norm."""

    def __init__(self, parameters: Sequence[Tensor], noise: StepNoise) -> None:
        self.noise = noise
        self.sums = [
            torch.zeros(p.shape, dtype=torch.float64, device=_float64_device(p)) for p in parameters
        ]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add the gradients of some examples, (examples, *shape) for each parameter."""
        norms = joint_norms(gradients)
        finite = norms.isfinite()
        # Of a norm that is zero the factor is 1, of an infinite or undefined one 0.
        factors = (ROUNDING_MARGIN * self.noise.norm / norms).nan_to_num().clamp(max=1.0)
        clipped = []
        for total, grad in zip(self.sums, gradients, strict=True):
            rows = torch.where(finite[:, None].to(grad.device), grad.flatten(1), 0.0)
            rows = rows.to(total.device)
            clipped.append((factors.to(total.device) @ rows.double()).view_as(total))
        for total, part in zip(self.sums, clipped, strict=True):  # all, or none after an error
            total.add_(part)

    def noised_mean(self, expected: float) -> list[Tensor]:
        """Return the step's gradient with noise in float32, and reset the sum."""
        scale = self.noise.multiplier * self.noise.norm
        released = []
        for total in self.sums:
            noised = total + gaussian(total.shape, scale).to(total.device)
            released.append((noised / expected).float())
            total.zero_()
        return released


def joint_norms(gradients: Sequence[Tensor]) -> Tensor:
    """Return the norm of each example's gradient over all parameters, in float64."""
    squares = [
        grad.flatten(1).to(_float64_device(grad)).double().square().sum(1) for grad in gradients
    ]
    return torch.stack(squares).sum(0).sqrt()


def _float64_device(tensor: Tensor) -> torch.device:
    """Return the tensor's device, or the CPU if that device has no float64."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
