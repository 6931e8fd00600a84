"""Release the mean of clients' changes privately: clip, sum, add noise, divide by constants.

With the state S, the clip norm C, the noise multiplier z, and x_u the change of client u in all
tensors together, zero where it trained nothing, the next state is

    S + (sum over u of x_u min(1, C / |x_u|)  +  N(0, z^2 C^2 I)) / m

m has one number per coordinate: how many clients are *expected* to train it. With `head-mean = all`
it is how many clients are expected in the round. m is fixed before the round. A mean over the
clients that did train a coordinate would have another sensitivity: one more client would change the
divisor, and so the weight of all other changes. For the same reason a missing reply counts as zero,
and the divisor stays. Where m is zero, no client could have trained the coordinate, and the state
is unchanged, without noise.

The clip norm may adapt (Andrew et al., 2021). Each client adds one bit, whether its change was
within C, minus a half. The noised sum of the bits, divided by the expected clients, is the part of
changes within C minus a half, and C is multiplied by exp(-0.2 (part - 0.5)). Changes with noise
z1 C and bits with noise b, of sensitivity 1/2, are together one Gaussian mechanism of multiplier z
with 1 / z^2 = 1 / z1^2 + 1 / (2 b)^2. So z1 is a little larger than z, and z is accounted for.
"""

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ravan_flwr.methods.base import Method, split_classifier
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.methods.tensors import Tensors

QUANTILE, NORM_RATE = 0.5, 0.2  # target and learning rate of an adaptive clip norm
FIRST_NORM = 0.1  # of an adaptive clip norm, before the first round
BITS_SHARE = 20  # the bits' noise is the expected clients divided by this, as in the paper
ROUNDING_MARGIN = 1 - 2.0**-40  # so that no clipped change is rounded to above the norm


@dataclass(frozen=True)
class Noise:
    """The noise of a round.

    `clients` is the expected number of clients in it. With a `cohort` the noise is that of a mean
    over that many clients. A simulation with few clients then has the noise, and the epsilon, of a
    round with many.
    """

    multiplier: float
    clients: float
    adaptive: bool = False
    cohort: int | None = None

    @property
    def scale(self) -> float:
        """Return the factor by which a `cohort` reduces the noise."""
        return self.clients / self.cohort if self.cohort else 1.0

    @property
    def of_bits(self) -> float:
        """Return the standard deviation of the noise on the sum of the bits."""
        return self.scale * self._deviation_of_bits

    @property
    def of_changes(self) -> float:
        """Return the standard deviation of the noise on the sum of changes, over the clip norm."""
        if not self.adaptive:
            return self.scale * self.multiplier
        ratio = self.multiplier / (2 * self._deviation_of_bits)
        return self.scale * self.multiplier / math.sqrt(1 - ratio * ratio)

    @property
    def _deviation_of_bits(self) -> float:
        # With few clients a twentieth would be too little: 1 / (2 b)^2 must stay below 1 / z^2.
        return max((self.cohort or self.clients) / BITS_SHARE, self.multiplier)


class ClippedSum:
    """The sum of clients' clipped changes of a state; each has at most the clip norm."""

    def __init__(self, state: Mapping[str, Tensor], norm: float) -> None:
        self.state, self.norm = dict(state), norm
        self.sum = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in self.state.items()}
        self.count = 0
        self._sum_of_bits = 0.0

    def add(self, filled: Mapping[str, Tensor]) -> None:
        """Add a client's tensors, in the shapes of the state, with NaN where it trained nothing."""
        changes = {
            name: (filled[name].double() - old.double()).nan_to_num(0.0)
            for name, old in self.state.items()
        }
        norm = math.hypot(*(float(change.norm()) for change in changes.values()))
        factor = min(1.0, ROUNDING_MARGIN * self.norm / norm) if norm else 1.0
        for name, change in changes.items():
            self.sum[name].add_(change, alpha=factor)
        self.count += 1
        self._sum_of_bits += 0.5 if norm <= self.norm else -0.5

    def noised_mean(self, noise: Noise, expected: Mapping[str, Tensor]) -> Tensors:
        """Return the next state.

        `expected` is the number of clients for each coordinate, or broadcasts to it.
        """
        deviation, released = noise.of_changes * self.norm, {}
        for name, old in self.state.items():
            noised = self.sum[name] + gaussian(old.shape, deviation)
            moved = old.double() + noised / expected[name].double()
            released[name] = torch.where(expected[name] > 0, moved, old.double()).float()
        return released

    def next_norm(self, noise: Noise) -> float:
        """Return the next round's clip norm, which is released as well."""
        if not noise.adaptive:
            return self.norm
        bits = self._sum_of_bits + float(gaussian([1], noise.of_bits))
        within = min(1.0, max(0.0, bits / noise.clients + 0.5))
        return self.norm * math.exp(-NORM_RATE * (within - QUANTILE))


def expected_clients(
    method: Method, state: Mapping[str, Tensor], clients: Mapping[float, float], rate: float
) -> dict[str, Tensor]:
    """Return the expected number of clients for each tensor's numbers, to which it broadcasts.

    `clients` is the number of clients by budget fraction; `rate` is their sampling rate. With a
    mean over the cohort, all clients count for each number that any of them can train.
    """
    sums, (method_tensors, classifier) = sums_changes(method), split_classifier(state)
    total = {
        name: torch.zeros([1] * t.ndim, dtype=torch.float64) for name, t in method_tensors.items()
    }
    for fraction, number in clients.items():
        for name, chance in sums.coverage(method_tensors, fraction).items():
            total[name] = total[name] + rate * number * chance.double()
    everyone = torch.full([1], rate * sum(clients.values()), dtype=torch.float64)
    if sums.mean_over_cohort:
        total = {name: torch.where(t > 0, everyone, t) for name, t in total.items()}
    return total | dict.fromkeys(classifier, everyone)


# The noise and the sample of clients are drawn from the system's entropy, never from a seed. With
# the seed of a run anyone could draw its noise and subtract it. The same noise on other replies
# would also cancel in the difference of two states. So there is no generator and no state here:
# every number is computed from fresh bytes of `os.urandom`.
#
# A Box-Muller transform returns few of the float64 values, and which of them are possible reveals
# information on the value that they are added to (Mironov, 2012). As Holohan and Braghin (2021)
# propose, each number is the sum of several independent draws, divided by the root of their number.
# Guessing all of them is infeasible. The released numbers are then rounded to float32.

DRAWS = 4  # summed for one number
_BLOCK = 2**16
_FRACTION_BITS = 53  # of a float64's fraction


def gaussian(shape: Sequence[int], scale: float) -> Tensor:
    """Draw independent normal numbers with standard deviation `scale`, in float64."""
    flat = torch.empty(math.prod(shape), dtype=torch.float64)
    for block in flat.split(_BLOCK):
        total = sum(_normals(len(block)) for _ in range(DRAWS))
        block.copy_(torch.from_numpy(np.asarray(total) * (scale / math.sqrt(DRAWS))))
    return flat.view(*shape)


def subsample(number: int, probability: float) -> NDArray[np.int64]:
    """Return a Poisson sample of `range(number)`, each independently with that probability."""
    bits = np.frombuffer(os.urandom(8 * number), dtype=np.uint64) >> np.uint64(64 - _FRACTION_BITS)
    return np.flatnonzero(bits < np.uint64(math.ceil(probability * float(1 << _FRACTION_BITS))))


def _normals(number: int) -> NDArray[np.float64]:
    """Draw standard normal numbers, two from each pair of uniform ones (Box and Muller, 1958)."""
    pairs = -(-number // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    first, second = (bits >> np.uint64(64 - _FRACTION_BITS)).astype(
        np.float64
    ) * 2.0**-_FRACTION_BITS
    radius = np.sqrt(-2.0 * np.log(1.0 - first))  # of a number above 0 and at most 1
    angle = 2.0 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:number]
