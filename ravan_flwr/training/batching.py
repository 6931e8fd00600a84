"""Choose the examples of each batch: in a random order, or texts of similar lengths together.

A batch of texts is padded to its longest text. An evaluation therefore sorts texts by length,
longest first, so that a batch too large for the memory fails at once. Training groups by length
under `batching=length` only, because batches are then not fully random. A shuffled pass over the
examples is cut into pools of `POOL` batches. Each pool is sorted, cut into batches, and these are
shuffled.
"""

from collections.abc import Iterator
from itertools import tee

import numpy as np
import torch
from torch import Tensor

POOL = 8  # batches: larger pools mean less padding, and less random batches


def evaluation_batches(
    number: int, batch_size: int, lengths: np.ndarray | None = None
) -> list[np.ndarray]:
    """Divide all rows into batches of nearly equal size, sorted by length if lengths are given."""
    rows = np.arange(number) if lengths is None else np.argsort(-lengths, kind="stable")
    return list(np.array_split(rows, -(-number // batch_size)))


def training_batches(
    number: int, batch_size: int, random: torch.Generator, lengths: np.ndarray | None = None
) -> Iterator[np.ndarray]:
    """Yield batches from shuffled passes over the examples, without end.

    The last batch of a pass may be short. With lengths, any batch of the last pool may be that one.
    """
    while True:
        order = torch.randperm(number, generator=random)
        if lengths is None:
            yield from (rows.numpy() for rows in order.split(batch_size))
        else:
            for pool in order.split(POOL * batch_size):
                yield from _batches_of_pool(pool, batch_size, random, lengths)


def split_batches(
    batches: Iterator[np.ndarray], size: int
) -> tuple[Iterator[np.ndarray], Iterator[int]]:
    """Split batches into micro-batches of at most `size` rows.

    Return two iterators: the micro-batches, and the number of micro-batches of each batch.
    """

    def split(rows: np.ndarray) -> list[np.ndarray]:
        # A Poisson sample may be empty.
        return np.array_split(rows, -(-len(rows) // size)) if len(rows) else []

    first, second = tee(map(split, batches))
    return (micro_batch for parts in first for micro_batch in parts), map(len, second)


def _batches_of_pool(
    pool: Tensor, batch_size: int, random: torch.Generator, lengths: np.ndarray
) -> Iterator[np.ndarray]:
    """Sort a pool by length, cut it into batches, and yield these in a random order."""
    rows = pool.numpy()
    rows = rows[np.argsort(lengths[rows], kind="stable")]
    sizes = [len(part) for part in pool.split(batch_size)]
    # The sizes are permuted: a short last batch would always have the longest texts.
    order = torch.randperm(len(sizes), generator=random).tolist()
    cuts = np.cumsum([sizes[number] for number in order])[:-1]
    batches = np.split(rows, cuts)
    for number in torch.randperm(len(batches), generator=random).tolist():
        yield batches[number]
