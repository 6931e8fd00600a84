"""Choose the examples of each batch: in a random order, or texts of like lengths together.

A batch of texts is padded to its longest. So an evaluation takes them by length, longest first:
what does not fit into memory fails at once. Training does so under `batching=length` only, since
who meets whom is then no longer chance alone: a shuffled pass is cut into pools of `POOL` batches,
a pool is sorted and cut into batches, and these are shuffled.
"""

from collections.abc import Iterator
from itertools import tee

import numpy as np
import torch
from torch import Tensor

POOL = 8  # batches: with more there is less padding, and less chance in who meets whom


def evaluation_batches(
    number: int, batch_size: int, lengths: np.ndarray | None = None
) -> list[np.ndarray]:
    """Divide all rows into batches of nearly one size; by length, if lengths are known."""
    rows = np.arange(number) if lengths is None else np.argsort(-lengths, kind="stable")
    return list(np.array_split(rows, -(-number // batch_size)))


def training_batches(
    number: int, batch_size: int, random: torch.Generator, lengths: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Draw batches from one shuffled pass after the other, without end.

    The last of a pass may be short. With lengths, it is one of the last pool's.
    """
    while True:
        order = torch.randperm(number, generator=random)
        if lengths is None:
            yield from (rows.numpy() for rows in order.split(batch_size))
        else:
            for pool in order.split(POOL * batch_size):
                yield from _alike(pool, batch_size, random, lengths)


def in_parts(
    batches: Iterator[np.ndarray], size: int
) -> tuple[Iterator[np.ndarray], Iterator[int]]:
    """Cut batches into parts of so many rows at most; yield these, and how many each batch has."""

    def parts_of(rows: np.ndarray) -> list[np.ndarray]:
        # A Poisson draw may be empty.
        return np.array_split(rows, -(-len(rows) // size)) if len(rows) else []

    first, second = tee(map(parts_of, batches))
    return (part for parts in first for part in parts), map(len, second)


def _alike(
    pool: Tensor, batch_size: int, random: torch.Generator, lengths: np.ndarray
) -> Iterator[np.ndarray]:
    """Sort a pool by length, and yield its batches in a random order."""
    rows = pool.numpy()
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    sizes = [len(part) for part in pool.split(batch_size)]
    # A short batch may be of any length: else the longest texts would always be in it.
    place = torch.randperm(len(sizes), generator=random).tolist()
    cuts = np.cumsum([sizes[number] for number in place])[:-1]
    batches = np.split(rows, cuts)
    for number in torch.randperm(len(batches), generator=random).tolist():
        yield batches[number]
