"""The examples: a source split into train and test, and a client's partition of the first."""

import warnings
from dataclasses import dataclass

import datasets
import numpy as np
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, Partitioner

from ravan_flwr.config import DataSpec
from ravan_flwr.seeding import derive


def load_splits(spec: DataSpec) -> datasets.DatasetDict:
    """`train` and `test` of the source, the same on every machine."""
    return SOURCES[spec.source](spec)


def _sklearn_digits(spec: DataSpec) -> datasets.DatasetDict:
    """The 1,797 handwritten 8 x 8 digits of scikit-learn, 80 % to train and 20 % to test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (a second that others need not wait)
    from sklearn.model_selection import train_test_split  # noqa: PLC0415

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    features = datasets.Features(
        {
            "image": datasets.Array2D((8, 8), "float32"),
            spec.label_column: datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
    )
    train, test = train_test_split(
        np.arange(len(labels)), test_size=0.2, stratify=labels, random_state=0
    )
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {"image": images[rows], spec.label_column: labels[rows]}, features=features
            )
            for name, rows in (("train", train), ("test", test))
        }
    )


SOURCES = {"sklearn-digits": _sklearn_digits}


@dataclass(frozen=True)
class Partition:
    """How simulated clients share the training examples."""

    kind: str  # "iid" or "dirichlet"
    alpha: float
    number: int
    seed: int


def make_partitioner(
    train: datasets.Dataset, partition: Partition, label_column: str
) -> Partitioner:
    """A partitioner of `flwr-datasets` that has already dealt the examples out."""
    if partition.number > len(train):
        raise ValueError(
            f"{partition.number} clients share {len(train)} examples, expected at least one "
            "each; use fewer clients"
        )
    seed = derive(partition.seed, "partition") % 2**32
    if partition.kind == "iid":
        shuffled = train.shuffle(seed=seed)
        iid = IidPartitioner(num_partitions=partition.number)
        iid.dataset = shuffled
        return iid
    return _dirichlet(train, partition, label_column, seed)


def _dirichlet(
    train: datasets.Dataset, partition: Partition, label_column: str, seed: int
) -> Partitioner:
    """Every client's class proportions drawn from a Dirichlet distribution.

    Draws that leave a client with next to nothing are repeated, by flwr-datasets ten times
    a seed, then with further seeds.
    """
    smallest = max(1, min(10, len(train) // (4 * partition.number)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        for attempt in range(20):
            dirichlet = DirichletPartitioner(
                num_partitions=partition.number,
                partition_by=label_column,
                alpha=partition.alpha,
                min_partition_size=smallest,
                seed=seed + attempt,
            )
            dirichlet.dataset = train
            try:
                dirichlet.load_partition(0)
            except ValueError:
                continue
            return dirichlet
    raise ValueError(
        f"partition-alpha = {partition.alpha}: {partition.number} clients got fewer than "
        f"{smallest} of {len(train)} examples in every of 220 draws; raise partition-alpha or "
        "use fewer clients"
    )
