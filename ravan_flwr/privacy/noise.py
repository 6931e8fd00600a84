"""Draw the noise, and who takes part, from the system's entropy: never from a seed.

Who knows the seed of a run could draw its noise as well and take it off again; and the same noise
on other replies would cancel in the difference of two states. So there is no generator and no
state here: every number is made of fresh bytes of `os.urandom`.

A float64 that a Box-Muller transform makes is one of few values, and which of them can be reached
tells something of what it was added to (Mironov, 2012). As Holohan and Braghin (2021) propose, each
number is the sum of several independent draws, by the root of how many they are: to guess all of
them is out of reach. What is released is rounded to float32 after that.
"""

import math
import os
import secrets
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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


def happens(probability: float) -> bool:
    """Tell, independently of all else, whether something of that probability happens."""
    return secrets.randbits(_BITS) < probability * float(1 << _BITS)


def drawn(number: int, probability: float) -> NDArray[np.int64]:
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
