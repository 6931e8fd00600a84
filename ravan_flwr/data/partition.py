"""Deal out a shared data set to simulated clients, as a run config says.

A device with its own examples never comes here.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np

from ravan_flwr.data.columns import numbered, values_of
from ravan_flwr.data.other_partitions import (
    SIZES,
    partition_by_size,
    partition_few_classes,
    partition_naturally,
    partition_shards,
)
from ravan_flwr.data.partitioning import (
    DRAWS,
    check_number,
    partition_by_class,
    partition_by_client,
    partition_evenly,
)
from ravan_flwr.seeding import derive

SEEDS = 20  # that are tried, one after the other, until every client has enough

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partition:
    """Say how simulated clients share the training examples."""

    kind: str  # one of PARTITIONERS
    amount: float  # alpha of a Dirichlet distribution, or classes or shards of a client
    number: int
    seed: int


@dataclass(frozen=True)
class Rows:
    """Hold what the examples are dealt out by."""

    number: int
    column: str
    values: Sequence[str | float]  # of the column, where it is read


def deal_out(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """Deal out the rows of `train` to the clients.

    Under a Dirichlet partition, clients differ in how often they have each value of the column.
    Where only the number of examples counts, no column is read.
    """
    check_number(partition.number, len(train))
    read = partition.kind in BY_COLUMN
    rows = Rows(len(train), column, values_of(train, column) if read else [])
    seed = derive(partition.seed, "partition") % 2**32
    dealt = PARTITIONERS[partition.kind](rows, partition, seed)
    if left := len(train) - sum(map(len, dealt)):
        log.info("partition=%s: %d of %d examples are nobody's", partition.kind, left, len(train))
    return dealt


def _iid(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    """Deal out equal shares of a shuffled whole."""
    return partition_evenly(rows.number, partition.number, np.random.default_rng(seed))


def _dirichlet(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    """Split every class over the clients by a draw from a Dirichlet distribution.

    Clients differ in what they have, and widely in how much. Draws that leave a client with next to
    nothing are repeated, as flwr-datasets does ten times a seed, then with further seeds.
    """
    number, labels = partition.number, numbered(rows.values)[1]
    smallest = max(1, min(10, rows.number // (4 * number)))
    for attempt in range(SEEDS):
        random = np.random.default_rng(seed + attempt)
        dealt = partition_by_class(labels, number, partition.amount, smallest, random)
        if dealt is not None:
            return dealt
    raise ValueError(
        f"partition = '{partition.kind}:{partition.amount:g}': {number} clients got fewer than "
        f"{smallest} of {rows.number} examples in every of {SEEDS * DRAWS} draws; raise alpha, use "
        "fewer clients, or partition=dirichlet-by-client"
    )


def _dirichlet_by_client(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    """Draw every client's proportions from a Dirichlet distribution, and give equal shares."""
    labels = np.asarray(rows.values)
    return partition_by_client(
        labels, partition.number, partition.amount, np.random.default_rng(seed)
    )


def _natural(rows: Rows, partition: Partition, _: int) -> list[np.ndarray]:
    return partition_naturally(rows.values, partition.number, rows.column)


def _pathological(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return partition_few_classes(rows.values, partition.number, int(partition.amount), random)


def _shards(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return partition_shards(rows.values, partition.number, int(partition.amount), random)


def _by_size(rows: Rows, partition: Partition, seed: int) -> list[np.ndarray]:
    return partition_by_size(
        partition.kind, rows.number, partition.number, np.random.default_rng(seed)
    )


PARTITIONERS = {
    "iid": _iid,
    "dirichlet": _dirichlet,
    "dirichlet-by-client": _dirichlet_by_client,
    "natural": _natural,
    "pathological": _pathological,
    "shards": _shards,
    **dict.fromkeys(SIZES, _by_size),
}
BY_COLUMN = ("dirichlet", "dirichlet-by-client", "natural", "pathological", "shards")
