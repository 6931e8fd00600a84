"""Randomness as a function: of (seed, what for), never of what ran before."""

import hashlib

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed for one purpose, such as ("train", round, partition id)."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU for one purpose, the same on every machine."""
    return torch.Generator().manual_seed(derive(seed, *purpose))
