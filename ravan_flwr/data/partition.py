"""Deal out a shared data set to simulated clients, by flwr-datasets' partitioners or dealing.py.

flwr-datasets imports matplotlib and seaborn, a second of every message to a device, which has a
process of its own for each; a device with its own examples never comes here.
"""

import logging
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING

import datasets
import numpy as np

from ravan_flwr.data.columns import values_of
from ravan_flwr.data.dealing import deal_by_client
from ravan_flwr.data.other_partitions import (
    SIZES,
    deal_by_size,
    deal_few_classes,
    deal_naturally,
    deal_shards,
)
from ravan_flwr.seeding import derive

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Partition:
    """Say how simulated clients share the training examples."""

    kind: str  # one of PARTITIONERS
    alpha: float
    number: int
    seed: int
    classes: int = 2  # of a client, if pathological
    shards: int = 2  # of a client


def deal_out(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """Deal out the rows of `train` to the clients.

    Under a Dirichlet partition, clients differ in how often they have each value of the column.
    Where only the number of examples counts, no column is read.
    """
    if partition.number > len(train):
        raise ValueError(
            f"{partition.number} clients share {len(train)} examples, expected at least one "
            "each; use fewer clients"
        )
    read = partition.kind in BY_COLUMN
    values = {column: values_of(train, column)} if read else {}
    rows = datasets.Dataset.from_dict({"row": np.arange(len(train)), **values})
    seed = derive(partition.seed, "partition") % 2**32
    dealt = PARTITIONERS[partition.kind](rows, partition, column, seed)
    if left := len(train) - sum(map(len, dealt)):
        log.info("partition=%s: %d of %d examples are nobody's", partition.kind, left, len(train))
    return dealt


def _iid(rows: datasets.Dataset, partition: Partition, _: str, seed: int) -> list[np.ndarray]:
    """Deal out equal shares of a shuffled whole, by flwr-datasets."""
    from flwr_datasets.partitioner import IidPartitioner  # noqa: PLC0415

    partitioner = IidPartitioner(num_partitions=partition.number)
    partitioner.dataset = rows.shuffle(seed=seed)
    return _dealt(partitioner, partition.number)


def _dirichlet(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    """Split every class over the clients by a draw from a Dirichlet distribution, by flwr-datasets.

    Clients differ in what they have, and widely in how much. Draws that leave a client with next to
    nothing are repeated, by flwr-datasets ten times a seed, then with further seeds.
    """
    from flwr_datasets.partitioner import DirichletPartitioner  # noqa: PLC0415

    smallest = max(1, min(10, len(rows) // (4 * partition.number)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        for attempt in range(20):
            partitioner = DirichletPartitioner(
                num_partitions=partition.number,
                partition_by=column,
                alpha=partition.alpha,
                min_partition_size=smallest,
                seed=seed + attempt,
            )
            partitioner.dataset = rows
            try:
                partitioner.load_partition(0)  # this draws, for all clients
            except ValueError as error:
                if "number of attempts" not in str(error):
                    raise
                continue
            return _dealt(partitioner, partition.number)
    raise ValueError(
        f"partition-alpha = {partition.alpha}: {partition.number} clients got fewer than "
        f"{smallest} of {len(rows)} examples in every of 220 draws; raise partition-alpha, use "
        "fewer clients, or partition=dirichlet-by-client"
    )


def _dealt(partitioner: "Partitioner", number: int) -> list[np.ndarray]:
    """Collect the rows of every client."""
    return [
        np.asarray(partitioner.load_partition(client).with_format("numpy")["row"][:])
        for client in range(number)
    ]


def _dirichlet_by_client(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    """Draw every client's proportions from a Dirichlet distribution, and give equal shares."""
    labels = np.asarray(rows[column][:])
    return deal_by_client(labels, partition.number, partition.alpha, np.random.default_rng(seed))


def _natural(rows: datasets.Dataset, partition: Partition, column: str, _: int) -> list[np.ndarray]:
    return deal_naturally(rows[column][:], partition.number, column)


def _pathological(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return deal_few_classes(rows[column][:], partition.number, partition.classes, random)


def _shards(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    random = np.random.default_rng(seed)
    return deal_shards(rows[column][:], partition.number, partition.shards, random)


def _by_size(rows: datasets.Dataset, partition: Partition, _: str, seed: int) -> list[np.ndarray]:
    return deal_by_size(partition.kind, len(rows), partition.number, np.random.default_rng(seed))


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
