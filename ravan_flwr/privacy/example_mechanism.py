"""Release the gradient of a step privately: clip each example's, sum, add noise, divide.

With g_j the gradient of example j's own loss by all that the client trains, in one vector, S the
examples that a Poisson draw of rate q chose of the client's n, C the clip norm and z the noise
multiplier, a step has in the place of its gradient (DP-SGD; Abadi et al., 2016)

    (sum over j in S of g_j min(1, C / |g_j|)  +  N(0, z^2 C^2 I)) / (q n)

q n is how many examples are *expected*. Divided by how many were drawn, the sum of the others would
depend on whether one was. A draw that is empty releases noise alone. What comes after, the client's
optimiser, its decay and its pull, works on what was released.

An example whose gradient is not finite counts as zero: it would be the only one that is seen.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ravan_flwr.privacy.account import StepNoise
from ravan_flwr.privacy.noise import gaussian

_BELOW = 1 - 2.0**-40  # so that rounding takes no clipped gradient above the norm


class ClippedExamples:
    """Keep the sum of clipped gradients; no example moves it by more than the norm."""

    def __init__(self, parameters: Sequence[Tensor], noise: StepNoise) -> None:
        self.noise = noise
        self.sums = [_zeros(parameter) for parameter in parameters]

    def add(self, gradients: Sequence[Tensor]) -> None:
        """Add those of some examples, (examples, *shape) for each parameter."""
        norms = joint_norms(gradients)
        sound = norms.isfinite()
        factors = (_BELOW * self.noise.norm / norms).clamp(max=1.0)
        factors = torch.where(sound & (norms > 0), factors, sound.double())
        clipped = []
        for total, each in zip(self.sums, gradients, strict=True):
            rows = torch.where(sound[:, None].to(each.device), each.flatten(1), 0.0)
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
    squares = [each.flatten(1).to(_exact(each)).double().square().sum(1) for each in gradients]
    return torch.stack(squares).sum(0).sqrt()


def step_noise_norm(numbers: int, noise: StepNoise, expected: float) -> float:
    """Return the norm of the noise in a step's gradient of so many numbers."""
    return noise.multiplier * noise.norm * math.sqrt(numbers) / expected


def _zeros(parameter: Tensor) -> Tensor:
    return torch.zeros(parameter.shape, dtype=torch.float64, device=_exact(parameter))


def _exact(tensor: Tensor) -> torch.device:
    """Choose where to sum up: on the tensor's device, unless that knows no float64."""
    return torch.device("cpu") if tensor.device.type == "mps" else tensor.device
