"""Encode changes as integers that can be summed modulo 2^24, and decode such sums.

A number within a bound C becomes one of 65,535 steps from -C to C, of which one is zero. It is
rounded up or down at random, so the mean is unbiased. Numbers beyond the bound are clipped, and NaN
becomes zero; both are counted. The sum of 256 clients is below 2^24, so a number takes 3 bytes.
"""

import math

import numpy as np
from numpy.typing import NDArray

Numbers = NDArray[np.uint32]

LEVELS = 2**16 - 2  # the step of C; -C has step 0, and zero has the step in the middle
MODULUS = 2**24
WIDTH = 3  # bytes of a number
MASK = np.uint32(MODULUS - 1)


def to_steps(
    values: NDArray[np.float64], bound: float, random: np.random.Generator
) -> tuple[Numbers, int]:
    """Return numbers rounded to steps, and how many were not within the bound.

    NaN counts as no change: an error because of it would reveal something about the examples.
    """
    middle = LEVELS // 2
    scaled = np.nan_to_num(np.clip(values, -bound, bound)) * (middle / bound)
    steps = np.floor(scaled + random.random(values.shape)) + middle
    beyond = int(np.count_nonzero(~(np.abs(values) <= bound)))
    return np.clip(steps, 0, LEVELS).astype(np.uint32), beyond


def decode_mean(total: Numbers, clients: int, bound: float) -> NDArray[np.float64]:
    """Return the mean over that many clients; ValueError if their sum cannot be as large."""
    max_sum = clients * LEVELS
    if total.size and int(total.max()) > max_sum:
        raise ValueError(
            f"a sum of {clients} clients is {int(total.max())}, expected {max_sum} at most: a "
            "client sent what is not masked as agreed"
        )
    middle = LEVELS // 2
    return (total.astype(np.float64) / clients - middle) * (bound / middle)


def to_bytes(numbers: Numbers) -> bytes:
    """Return numbers below 2^24 as three bytes each, little-endian."""
    return numbers.astype("<u4").view(np.uint8).reshape(-1, 4)[:, :WIDTH].tobytes()


def from_bytes(data: bytes) -> Numbers:
    """Return the numbers of `to_bytes`."""
    parts = np.frombuffer(data, np.uint8).reshape(-1, WIDTH)
    wide = np.zeros((len(parts), 4), np.uint8)
    wide[:, :WIDTH] = parts
    return wide.view("<u4").reshape(-1).astype(np.uint32)


def choose_bound(steps: float, largest: float) -> float:
    """Return a bound of the changes of numbers whose largest is `largest`.

    `steps` is the learning rate times the number of steps, about as far as Adam moves a number. In
    a product s H both factors move: by steps (1 + steps + |H|) at most. The bound is twice that.
    """
    bound = 2 * steps * (1 + steps + largest)
    return bound if math.isfinite(bound) and bound > 0 else 1.0
