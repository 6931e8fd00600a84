"""The examples: a source split into train and test, and a client's partition of the first."""

import warnings
from dataclasses import dataclass

import datasets
import numpy as np
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, Partitioner

from ravan_flwr.preset import DataSpec
from ravan_flwr.seeding import derive


def load_splits(spec: DataSpec) -> datasets.DatasetDict:
    """`train` and `test` of the source, the same on every machine."""
    return SOURCES[spec.source](spec)


def _sklearn_digits(spec: DataSpec) -> datasets.DatasetDict:
    """The 1,797 handwritten 8 x 8 digits of scikit-learn, 80 % to train and 20 % to test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (only this source needs it)

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    features = datasets.Features(
        {
            "image": datasets.Array2D((8, 8), "float32"),
            spec.label_column: datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
    )
    test = _fifth_of_each_class(labels)
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {"image": images[rows], spec.label_column: labels[rows]}, features=features
            )
            for name, rows in (("train", ~test), ("test", test))
        }
    )


def _fifth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """A mask over the examples, the same always; `datasets` would go through them row by row."""
    random = np.random.default_rng(0)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(len(rows) / 5)]] = True
    return chosen


SOURCES = {"sklearn-digits": _sklearn_digits}


def num_labels(spec: DataSpec) -> int:
    """How many classes a source has, known without loading it."""
    return {"sklearn-digits": 10}[spec.source]


@dataclass(frozen=True)
class Partition:
    """How simulated clients share the training examples."""

    kind: str  # "iid" or "dirichlet"
    alpha: float
    number: int
    seed: int


def deal_out(train: datasets.Dataset, partition: Partition, label_column: str) -> list[np.ndarray]:
    """The rows of `train` that each client has, as the partitioners of flwr-datasets deal them."""
    if partition.number > len(train):
        raise ValueError(
            f"{partition.number} clients share {len(train)} examples, expected at least one "
            "each; use fewer clients"
        )
    rows = datasets.Dataset.from_dict(
        {"row": np.arange(len(train)), label_column: train[label_column][:]}
    )
    seed = derive(partition.seed, "partition") % 2**32
    partitioner = PARTITIONERS[partition.kind](rows, partition, label_column, seed)
    return [
        np.asarray(partitioner.load_partition(client).with_format("numpy")["row"][:])
        for client in range(partition.number)
    ]


def _iid(rows: datasets.Dataset, partition: Partition, _: str, seed: int) -> Partitioner:
    """Equal shares of a shuffled whole."""
    partitioner = IidPartitioner(num_partitions=partition.number)
    partitioner.dataset = rows.shuffle(seed=seed)
    return partitioner


def _dirichlet(
    rows: datasets.Dataset, partition: Partition, label_column: str, seed: int
) -> Partitioner:
    """Every client's class proportions drawn from a Dirichlet distribution.

    Draws that leave a client with next to nothing are repeated, by flwr-datasets ten times
    a seed, then with further seeds.
    """
    smallest = max(1, min(10, len(rows) // (4 * partition.number)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        for attempt in range(20):
            partitioner = DirichletPartitioner(
                num_partitions=partition.number,
                partition_by=label_column,
                alpha=partition.alpha,
                min_partition_size=smallest,
                seed=seed + attempt,
            )
            partitioner.dataset = rows
            try:
                partitioner.load_partition(0)  # this draws, for all clients
            except ValueError:
                continue
            return partitioner
    raise ValueError(
        f"partition-alpha = {partition.alpha}: {partition.number} clients got fewer than "
        f"{smallest} of {len(rows)} examples in every of 220 draws; raise partition-alpha or "
        "use fewer clients"
    )


PARTITIONERS = {"iid": _iid, "dirichlet": _dirichlet}
