"""Count who has what: examples by client, and by client and class."""

from collections.abc import Sequence
from dataclasses import dataclass

import datasets
import numpy as np

from ravan_flwr.data.columns import numbered, values_of


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
