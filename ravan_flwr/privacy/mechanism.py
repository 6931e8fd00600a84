"""Release the mean of clients' changes privately: clip each, sum, add noise, divide by constants.

With S the state, C the clip norm, z the noise multiplier, and x_u what client u changes in all
tensors together, zero where it trained nothing,

    S + (sum over u of x_u min(1, C / |x_u|)  +  N(0, z^2 C^2 I)) / m

m has a number for every coordinate: how many clients are *expected* to train it; with
`head-mean = all`, how many are expected at all. It is fixed before the round. A mean over those
that did train it would have another sensitivity: one client more or less changes the divisor, and
so what all others sent. For the same reason a reply that is missing counts as zero and nothing is
divided by fewer. Where m is zero, which nobody could have chosen, the state stays as it is,
without noise.

The clip norm may adapt (Andrew et al., 2021): each client adds one bit, whether its change was
within C, less a half. Their noised sum, by the expected clients, is the part of changes within C,
and C moves by exp(-0.2 (part - 0.5)). Changes with noise z1 C and bits with noise b, of
sensitivity 1/2, are together one Gaussian mechanism of multiplier z where
1 / z^2 = 1 / z1^2 + 1 / (2 b)^2: so z1 is a little larger than z, and z is what is accounted for.
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

QUANTILE, RATE = 0.5, 0.2  # of an adaptive clip norm
FIRST_NORM = 0.1  # of a clip norm that adapts, before the first round
BITS_SHARE = 20  # the noise of the bits is this part of the expected clients, as in the paper
BELOW = 1 - 2.0**-40  # so that rounding takes no clipped change above the norm


@dataclass(frozen=True)
class Noise:
    """Say how much noise a round needs.

    `clients` is how many are expected to train in it. With a `cohort` the noise is that of a mean
    over so many: a simulation with few clients then shows what many would get, and its account is
    theirs.
    """

    multiplier: float
    clients: float
    adaptive: bool = False
    cohort: int | None = None

    @property
    def scale(self) -> float:
        """Return by what a cohort that is only thought of makes the noise smaller."""
        return self.clients / self.cohort if self.cohort else 1.0

    @property
    def of_bits(self) -> float:
        """Return the standard deviation of the noise on the sum of the bits."""
        return self.scale * self._bits

    @property
    def of_changes(self) -> float:
        """Return that of the noise on the sum of the changes, by the clip norm."""
        if not self.adaptive:
            return self.scale * self.multiplier
        part = self.multiplier / (2 * self._bits)
        return self.scale * self.multiplier / math.sqrt(1 - part * part)

    @property
    def _bits(self) -> float:
        # Of few clients a twentieth would leave no noise to the changes.
        return max((self.cohort or self.clients) / BITS_SHARE, self.multiplier)


class ClippedSum:
    """Keep the sum of clipped changes from a state; no client moves it by more than the norm."""

    def __init__(self, state: Mapping[str, Tensor], norm: float) -> None:
        self.state, self.norm = dict(state), norm
        self.sum = {k: torch.zeros_like(t, dtype=torch.float64) for k, t in self.state.items()}
        self.count = 0
        self._bits = 0.0

    def add(self, filled: Mapping[str, Tensor]) -> None:
        """Add a client's tensors, in the shapes of the state, NaN where it trained nothing."""
        changes = {
            name: (filled[name].double() - old.double()).nan_to_num(0.0)
            for name, old in self.state.items()
        }
        norm = math.hypot(*(float(change.norm()) for change in changes.values()))
        factor = min(1.0, BELOW * self.norm / norm) if norm else 1.0
        for name, change in changes.items():
            self.sum[name].add_(change, alpha=factor)
        self.count += 1
        self._bits += 0.5 if norm <= self.norm else -0.5

    def release(self, noise: Noise, expected: Mapping[str, Tensor]) -> Tensors:
        """Make the next state; `expected` has the clients by coordinate, or broadcasts to that."""
        deviation, released = noise.of_changes * self.norm, {}
        for name, old in self.state.items():
            noised = self.sum[name] + gaussian(old.shape, deviation)
            moved = old.double() + noised / expected[name].double()
            released[name] = torch.where(expected[name] > 0, moved, old.double()).float()
        return released

    def next_norm(self, noise: Noise) -> float:
        """Make the next round's clip norm, which is released as well."""
        if not noise.adaptive:
            return self.norm
        bits = self._bits + float(gaussian([1], noise.of_bits))
        within = min(1.0, max(0.0, bits / noise.clients + 0.5))
        return self.norm * math.exp(-RATE * (within - QUANTILE))


def expected_clients(
    method: Method, state: Mapping[str, Tensor], clients: Mapping[float, float], rate: float
) -> dict[str, Tensor]:
    """Count them for each tensor, to which the counts broadcast.

    `clients` has how many there are by budget fraction, and each takes part with that rate.
    Where a method's mean is over all, all count for what one of them can train.
    """
    sums, (own, classifier) = sums_changes(method), split_classifier(state)
    total = {name: torch.zeros([1] * t.ndim, dtype=torch.float64) for name, t in own.items()}
    for fraction, number in clients.items():
        for name, chance in sums.coverage(own, fraction).items():
            total[name] = total[name] + rate * number * chance.double()
    everyone = torch.full([1], rate * sum(clients.values()), dtype=torch.float64)
    if sums.mean_over_cohort:
        total = {name: torch.where(t > 0, everyone, t) for name, t in total.items()}
    return total | dict.fromkeys(classifier, everyone)


def noise_norm(
    state: Mapping[str, Tensor], expected: Mapping[str, Tensor], deviation: float
) -> float:
    """Return the norm that noise has in the next state, where that is its size in the sum."""
    squares = 0.0
    for name, tensor in state.items():
        counts = expected[name][expected[name] > 0]
        size = tensor.numel() / max(1, expected[name].numel())  # numbers to which a count belongs
        squares += size * float(counts.pow(-2).sum())
    return float(deviation * squares**0.5)


# The noise, and who takes part, are drawn from the system's entropy: never from a seed. Who knows
# the seed of a run could draw its noise as well and take it off again; and the same noise on other
# replies would cancel in the difference of two states. So there is no generator and no state here:
# every number is made of fresh bytes of `os.urandom`.
#
# A float64 that a Box-Muller transform makes is one of few values, and which of them can be reached
# tells something of what it was added to (Mironov, 2012). As Holohan and Braghin (2021) propose,
# each number is the sum of several independent draws, by the root of how many they are: to guess
# all of them is out of reach. What is released is rounded to float32 after that.

DRAWS = 4  # whose sum makes one number
_BLOCK = 2**16
_BITS = 53  # of a float64's fraction


def gaussian(shape: Sequence[int], scale: float) -> Tensor:
    """Draw independent normal numbers of that standard deviation, in float64."""
    flat = torch.empty(math.prod(shape), dtype=torch.float64)
    for part in flat.split(_BLOCK):
        total = sum(_normals(len(part)) for _ in range(DRAWS))
        part.copy_(torch.from_numpy(np.asarray(total) * (scale / math.sqrt(DRAWS))))
    return flat.view(*shape)


def subsample(number: int, probability: float) -> NDArray[np.int64]:
    """Draw from so many, each by itself with that probability; return which."""
    bits = np.frombuffer(os.urandom(8 * number), dtype=np.uint64) >> np.uint64(64 - _BITS)
    return np.flatnonzero(bits < np.uint64(math.ceil(probability * float(1 << _BITS))))


def _normals(number: int) -> NDArray[np.float64]:
    """Draw standard normal numbers, two of each pair of uniform ones (Box and Muller, 1958)."""
    pairs = -(-number // 2)
    bits = np.frombuffer(os.urandom(16 * pairs), dtype=np.uint64).reshape(2, pairs)
    first, second = (bits >> np.uint64(64 - _BITS)).astype(np.float64) * 2.0**-_BITS
    radius = np.sqrt(-2.0 * np.log(1.0 - first))  # of a number above 0 and at most 1
    angle = 2.0 * math.pi * second
    return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:number]
