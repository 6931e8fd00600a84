"""Share a secret among clients so that a threshold of them can tell it, and fewer nothing.

Shamir (1979): the secret is the value at 0 of a polynomial of degree threshold - 1, all of whose
other coefficients are drawn from the system's entropy; the client in place i gets the value at
i + 1. Numbers are modulo the first prime above 2^256, so that any 32 bytes are a secret.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import lru_cache

PRIME = 2**256 + 297
SECRET = 32  # bytes
SHARE = 33  # bytes
NONE = b"\xff" * SHARE  # no share: it is above the prime


def split(secret: bytes, threshold: int, number: int) -> list[bytes]:
    """Split a secret of 32 bytes into that many shares."""
    random_terms = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    coefficients = [int.from_bytes(secret, "big"), *random_terms]
    values = (value_at(coefficients, place + 1) for place in range(number))
    return [value.to_bytes(SHARE, "big") for value in values]


def join(shares: Mapping[int, bytes], threshold: int) -> bytes:
    """Compute the secret from the shares of some places; ValueError for too few, or wrong ones."""
    if len(shares) < threshold:
        raise ValueError(f"got {len(shares)} shares, expected at least {threshold}")
    places = sorted(shares)[:threshold]
    factors = _factors(tuple(place + 1 for place in places))
    value = sum(f * unpack(shares[p]) for f, p in zip(factors, places, strict=True)) % PRIME
    if value >= 2 ** (8 * SECRET):
        raise ValueError("got shares that do not belong together, expected those of one secret")
    return value.to_bytes(SECRET, "big")


def value_at(coefficients: Sequence[int], x: int) -> int:
    """Compute the polynomial's value, the constant coefficient first (Horner)."""
    value = 0
    for coefficient in reversed(coefficients):
        value = (value * x + coefficient) % PRIME
    return value


def unpack(share: bytes) -> int:
    """Read a share; ValueError if it is none."""
    value = int.from_bytes(share, "big")
    if len(share) != SHARE or value >= PRIME:
        raise ValueError("got bytes that are no share, expected a number below the prime")
    return value


@lru_cache(maxsize=64)
def _factors(points: tuple[int, ...]) -> tuple[int, ...]:
    """Compute by what the values at these points are multiplied to give that at 0 (Lagrange)."""
    factors = []
    for point in points:
        above = below = 1
        for other in points:
            if other != point:
                above = above * other % PRIME
                below = below * (other - point) % PRIME
        factors.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(factors)
