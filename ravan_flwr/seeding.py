"""Make randomness a function of (seed, purpose), never of what ran before."""

import hashlib
from typing import NamedTuple

import torch


def derive(seed: int, *purpose: str | int) -> int:
    """Return a 63-bit seed for one purpose, such as ("train", round, partition id)."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """Return a generator on the CPU for one purpose, the same on every machine."""
    return torch.Generator().manual_seed(derive(seed, *purpose))


class ClientRound(NamedTuple):
    """One client's work in one round: all its randomness is a function of these fields."""

    seed: int
    round: int
    partition_id: int

    def derive(self, purpose: str) -> int:
        """Return a seed for one purpose within this work."""
        return derive(self.seed, purpose, self.round, self.partition_id)

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator for one purpose within this work."""
        return generator(self.seed, purpose, self.round, self.partition_id)
