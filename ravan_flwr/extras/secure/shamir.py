"""Share a secret among clients: a threshold of shares recovers it, fewer reveal nothing.

Shamir (1979): the secret is the value at 0 of a polynomial of degree threshold - 1, whose other
coefficients are drawn from the system's entropy. The client at position i gets the value at i + 1.
Numbers are modulo the first prime above 2^256, so any 32 bytes are a secret.
"""

import math
import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SECRET = 32  # bytes
SHARE = 33  # bytes
NO_SHARE = b"\xff" * SHARE  # stands for a missing share: it is above the prime


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Return that many shares of a secret of 32 bytes."""
    random_terms = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *random_terms]
    values = (value_at(coefficients, position + 1) for position in range(number))
    return [value.to_bytes(SHARE, "big") for value in values]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Return the secret from shares by position; ValueError for too few or wrong shares."""
    if len(shares) < threshold:
        raise ValueError(f"got {len(shares)} shares, expected at least {threshold}")
    positions = sorted(shares)[:threshold]
    factors = _factors(tuple(position + 1 for position in positions))
    value = sum(f * unpack(shares[p]) for f, p in zip(factors, positions, strict=True)) % PRIME
    if value >= 2 ** (8 * SECRET):
        raise ValueError("got shares that do not belong together, expected those of one secret")
    return value.to_bytes(SECRET, "big")


def value_at(coefficients: Sequence[int], x: int) -> int:
    """Return the polynomial's value at x, for coefficients from the constant one on (Horner)."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def unpack(share: bytes) -> int:
    """Return a share as a number; ValueError if it is not valid."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE or value >= PRIME:
        raise ValueError("got bytes that are no share, expected a number below the prime")
    return value


@lru_cache(maxsize=64)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Return the factors of the values at these points whose sum is the value at 0 (Lagrange)."""
    factors = []
    for point in points:
        others = [other for other in points if other != point]
        below = math.prod(other - point for other in others)
        factors.append(math.prod(others) * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
