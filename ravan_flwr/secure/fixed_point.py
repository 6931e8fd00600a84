"""Write changes as whole numbers that can be summed modulo 2^24, and read such sums.

A number x within a bound C becomes one of 65,535 steps from -C to C, zero among them, rounded up or
down at random so that the mean over many is unbiased. Beyond the bound it is cut off, and NaN
becomes zero; both are counted. The sum of 256 clients is below 2^24: a number takes 3 bytes.
"""

import math

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
