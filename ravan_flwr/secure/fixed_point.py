"""Write changes as whole numbers that can be summed modulo 2^24, and read such sums.

Without noise a number x within a bound C becomes one of 65,535 steps from -C to C, zero among them,
rounded up or down at random so that the mean over many is unbiased. Beyond the bound it is cut
off, and NaN becomes zero; both are counted. The sum of 256 clients is below 2^24: a number takes
3 bytes.

With noise (`NoiseShares`) each client clips its change to a norm C, rounds it to steps of one size
such that the norm still is at most C, and adds noise, rounded to steps as well. Of n clients each
adds a standard deviation of z C / sqrt(n), so that the sum of all has z C. The server sees the sum
of those that have sent their numbers, two thirds of n at least, and adds what is missing.

A step is as small as leaves room for 256 changes of norm C and twelve standard deviations of the
noise. It is the same for any number of clients: what is released are whole steps where nobody drops
out, which would tell how many were drawn. A sum that wraps around would tell no more, only
something else.

A norm that adapts takes a bit of each client: whether its change was within C. It travels as a
number of its own, so large that the same noise is what the mechanism wants for it.
"""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint32]

LEVELS = 2**16 - 2  # the step that C becomes; -C becomes 0, and zero the step in the middle
MODULUS = 2**24
WIDTH = 3  # bytes of a number
MOST_CLIENTS = 256
MASK = np.uint32(MODULUS - 1)


def to_steps(
    values: NDArray[np.float64], bound: float, random: np.random.Generator
) -> tuple[Numbers, int]:
    """Round numbers to steps, and count those that are not within the bound.

    NaN counts as no change: a client that failed for it would tell the server of its examples.
    """
    middle = LEVELS // 2
    scaled = np.nan_to_num(np.clip(values, -bound, bound)) * (middle / bound)
    steps = np.floor(scaled + random.random(values.shape)) + middle
    beyond = int(np.count_nonzero(~(np.abs(values) <= bound)))
    return np.clip(steps, 0, LEVELS).astype(np.uint32), beyond


def mean_of(total: Numbers, clients: int, bound: float) -> NDArray[np.float64]:
    """Read the mean of that many clients; ValueError if a sum is none that they can have made."""
    most = clients * LEVELS
    if total.size and int(total.max()) > most:
        raise ValueError(
            f"a sum of {clients} clients is {int(total.max())}, expected {most} at most: a client "
            "sent what is not masked as agreed"
        )
    middle = LEVELS // 2
    return (total.astype(np.float64) / clients - middle) * (bound / middle)


def to_bytes(numbers: Numbers) -> bytes:
    """Write numbers below 2^24 in three bytes each, the lowest first."""
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :WIDTH].tobytes()


def from_bytes(data: bytes) -> Numbers:
    """Read numbers of three bytes each."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, WIDTH)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, :WIDTH] = parts
    return wide.view("<u4").reshape(-1).astype(np.uint32)


def bound_of(steps: float, largest: float) -> float:
    """Choose a bound for changes of numbers as large as that, after so many steps of that rate.

    `steps` is the learning rate times the number of steps, about as far as Adam moves a number. Of
    a product s H both move: by steps (1 + steps + |H|) at most. Twice that leaves room.
    """
    bound = 2 * steps * (1 + steps + largest)
    return bound if math.isfinite(bound) and bound > 0 else 1.0


ROOM = 12  # standard deviations of the noise that a sum has room for
LEAST, MOST = 0.1, 2000.0  # noise multipliers; of the least, noise of one client has 200 steps
LEAST_NORM, MOST_NORM = 1e-100, 1e100  # between them no step, and no deviation, is 0 or infinite
_CLOSE = 1e-9  # of two ways to compute one multiplier
_TRIES = 8
_HALF = MODULUS // 2

Steps = NDArray[np.int64]


@dataclass(frozen=True)
class NoiseShares:
    """Say what the noise on the sum of a round is, of which each client adds its share."""

    norm: float  # C, of a client's whole change
    multiplier: float  # of the noise on the sum of changes, by C
    bits: float = 0.0  # standard deviation of that on the sum of the bits; 0: C does not adapt

    @property
    def whole(self) -> float:
        """Return the noise multiplier of changes and bits together: what is accounted for."""
        bit = 1 / (2 * self.bits) if self.bits else 0.0
        return 1 / math.hypot(1 / self.multiplier, bit)

    def left(self, clients: int, threshold: int) -> float:
        """Return the multiplier of what so many of the clients add: the rest may drop out."""
        return self.whole * math.sqrt(threshold / clients)

    @property
    def step(self) -> float:
        """Return the size of a step."""
        return self.norm * (MOST_CLIENTS + ROOM * self.multiplier) / (_HALF - MOST_CLIENTS)

    def deviation(self, clients: int) -> float:
        """Return the standard deviation of one client's noise, in steps."""
        return self.multiplier * self.norm / (math.sqrt(clients) * self.step)

    @property
    def bit(self) -> int:
        """Return how many steps a client's bit is, up or down."""
        return int(self.multiplier * self.norm / (2 * self.bits) / self.step)

    def check(self) -> None:
        """Raise ValueError unless this is noise that a client may take part with."""
        sound = 0 <= self.bits < math.inf and LEAST <= self.multiplier <= MOST
        sound = sound and LEAST_NORM <= self.norm <= MOST_NORM
        # Bits with next to no noise would tell which client's change was within the norm.
        if not sound or self.whole < LEAST * (1 - _CLOSE):
            raise ValueError(
                f"got noise of multiplier {self.multiplier} on changes of norm {self.norm}, with "
                f"{self.bits} on bits, expected {LEAST:g} to {MOST:g}, of both together {LEAST:g} "
                f"at least, and a norm of {LEAST_NORM:g} to {MOST_NORM:g}"
            )


def round_within(values: NDArray[np.float64], most: float, random: np.random.Generator) -> Steps:
    """Round numbers of norm `most` at most to whole ones whose norm is at most that, too.

    Up or down at random, so that the mean is right, from a norm a little smaller. In the rare case
    that the norm grew too much it is tried again, and at last all are rounded towards zero.
    """
    norm, size = float(np.linalg.norm(values)), values.size
    grows = size / 4 + 4 * (most + math.sqrt(size))  # the squared norm, hardly ever by more
    if grows < most * most / 2:
        aim = math.sqrt(most * most - grows)
        smaller = values * min(1.0, aim / norm) if norm else values
        for _ in range(_TRIES):
            steps = np.floor(smaller + random.random(size)).astype(np.int64)
            if int(np.dot(steps, steps)) <= most * most:
                return steps
    steps = np.trunc(values).astype(np.int64)
    return steps if int(np.dot(steps, steps)) <= most * most else np.zeros_like(steps)


def to_numbers(steps: Steps) -> Numbers:
    """Write whole numbers of either sign modulo 2^24."""
    return (steps & int(MASK)).astype(np.uint32)


def signed(total: Numbers) -> NDArray[np.float64]:
    """Read a sum modulo 2^24 as the number of either sign that is nearest to zero."""
    return ((total.astype(np.int64) + _HALF) & int(MASK)).astype(np.float64) - _HALF
