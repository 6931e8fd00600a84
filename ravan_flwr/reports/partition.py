"""Partition a run's examples as its clients will have them, and count them by client and class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import datasets
import numpy as np

from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.data.columns import numbered, values_of
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import BY_COLUMN, deal_out
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import column_for, held_back, partition_of, settle


@dataclass(frozen=True)
class PartitionReport:
    """Hold the numbers of examples of each client, of each class where there are classes."""

    counts: np.ndarray  # (clients, classes); one column where there are no classes
    classes: tuple[str, ...]  # their names; none where there are none
    names: tuple[str, ...]  # of the clients, where the data has names for them
    nobodys: int  # examples that were left over

    @property
    def sizes(self) -> np.ndarray:
        """Count the examples of each client."""
        found: np.ndarray = self.counts.sum(1)
        return found

    @property
    def shares(self) -> np.ndarray:
        """Compute of each client which share of its examples is of which class."""
        shares: np.ndarray = self.counts / self.sizes[:, None]
        return shares

    @property
    def unlike(self) -> float:
        """Compute how unlike the whole the clients are: 0 alike, towards 1 nothing in common.

        It is the share of a client's examples that would have to be of other classes, in the mean.
        """
        whole = self.counts.sum(0) / self.counts.sum()
        return float(np.abs(self.shares - whole).sum(1).mean() / 2)

    def in_order(self) -> np.ndarray:
        """List the clients by their largest class, and within it by its share; else by size."""
        if not self.classes:
            return np.argsort(-self.sizes, kind="stable")
        shares = self.shares
        return np.lexsort((-shares.max(1), shares.argmax(1)))


@dataclass(frozen=True)
class Assignment:
    """Hold what clients have, under which settings, and how long they train on it."""

    config: Config  # with the number of clients
    holdings: PartitionReport
    classes: str  # the column that they are counted by; "" if none
    steps: np.ndarray  # of each client in a round

    @property
    def by_label(self) -> bool:
        """Tell whether they are counted by the task's own labels, whose names are no secret."""
        return self.classes == "label" and bool(self.config.data.labels)


def deal(settings: Mapping[str, Scalar], num_clients: int | None = None) -> Assignment:
    """Deal out the examples as in a run with these settings."""
    config = settle(read_config(own_preset(settings)))
    number = number_of_clients(config, num_clients)
    config = replace(config, num_clients=number)
    train = load_splits(config.data)["train"]
    column = column_for(config, train)
    dealt = deal_out(train, partition_of(config, number, config.seed), column)
    natural = config.partition == "natural"
    classes = _classes(config, train, column)
    found = holdings_of(train, dealt, classes, config.data.labels, column if natural else "")
    trained = [size - held_back(config, size) for size in found.sizes.tolist()]
    return Assignment(config, found, classes, np.array([config.steps_of(size) for size in trained]))


def _classes(config: Config, train: datasets.Dataset, column: str) -> str:
    """Choose the column to count by: the one that makes clients differ, or the label."""
    if config.partition in BY_COLUMN and config.partition != "natural":
        return column
    other = column if config.partition != "natural" else ""
    return next((name for name in ("label", other) if name in train.column_names), "")


def holdings_of(
    train: datasets.Dataset,
    dealt: Sequence[np.ndarray],
    classes: str,
    labels: Sequence[str],
    names: str = "",
) -> PartitionReport:
    """Count what was dealt out, by the column `classes` if there is one.

    `labels` are the names of labels that are numbers. The column `names` has the clients' names.
    """
    number = sum(map(len, dealt))
    owners = np.repeat(np.arange(len(dealt)), [len(rows) for rows in dealt])
    of_class, called = np.zeros(number, np.int64), [""]
    if classes:
        different, places = numbered(values_of(train, classes))
        called = [_name_of(train, classes, value, labels) for value in different]
        of_class = places[np.concatenate(dealt)]
    counts = np.bincount(owners * len(called) + of_class, minlength=len(dealt) * len(called))
    who = train[names][:] if names else []
    return PartitionReport(
        counts.reshape(len(dealt), len(called)),
        tuple(called) if classes else (),
        tuple(_name_of(train, names, who[rows[0]], labels) for rows in dealt if who),
        len(train) - number,
    )


def _name_of(
    train: datasets.Dataset, column: str, value: str | float, labels: Sequence[str]
) -> str:
    """Name a class or a client, which may be a number."""
    feature = train.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return str(feature.names[int(value)])
    if column == "label" and type(value) is int and 0 <= value < len(labels):
        return labels[value]
    return str(value)
