"""Partition a run's examples among its clients, and count them by client and class."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import datasets
import numpy as np
import pandas as pd

from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.partition import BY_COLUMN, find_column, numbered, partition_rows, read_values
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.specs import Scalar
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.model_and_data import make_partition, settle, validation_size

ROWS = 40  # clients with a line, at most
CLASSES = 20  # classes with a column, at most
NAME = 24  # characters of a name, at most


@dataclass(frozen=True)
class PartitionReport:
    """The number of examples of each client, by class if there are classes."""

    counts: np.ndarray  # (clients, classes); one column where there are no classes
    classes: tuple[str, ...]  # their names; empty without classes
    names: tuple[str, ...]  # of the clients, if the data has names for them
    unassigned: int  # examples that no client has

    @property
    def sizes(self) -> np.ndarray:
        """Return the number of examples of each client, (clients,)."""
        return np.asarray(self.counts.sum(1))

    @property
    def shares(self) -> np.ndarray:
        """Return each client's fraction of examples of each class, (clients, classes)."""
        return np.asarray(self.counts / self.sizes[:, None])

    @property
    def skew(self) -> float:
        """Return the mean total variation distance between a client's classes and the overall ones.

        It is the mean fraction of a client's examples that would have to be of other classes: 0 if
        clients are alike, towards 1 if they have nothing in common.
        """
        total_shares = self.counts.sum(0) / self.counts.sum()
        return float(np.abs(self.shares - total_shares).sum(1).mean() / 2)


@dataclass(frozen=True)
class Assignment:
    """A partition report, with the run's settings and the steps of each client."""

    config: Config  # with the number of clients
    report: PartitionReport
    classes: str  # the column that examples are counted by; "" if none
    steps: np.ndarray  # of each client in a round


def assign(settings: Mapping[str, Scalar], num_clients: int | None = None) -> Assignment:
    """Partition the examples as in a run with these settings.

    For a language model the counts include examples that cannot be learned, which a run drops.
    """
    config = settle(read_config(with_preset_path(settings)))
    number = number_of_clients(config, num_clients)
    config = replace(config, num_clients=number)
    train = load_splits(config.data)["train"]
    column = find_column(config.data)
    parts = partition_rows(train, make_partition(config, number), column)
    natural = config.partition_scheme == "natural"
    classes = _class_column(config, train, column)
    report = count_examples(train, parts, classes, config.data.labels, column if natural else "")
    sizes = [size - validation_size(config, size) for size in report.sizes.tolist()]
    steps = np.array([config.count_steps(size) for size in sizes])
    return Assignment(config, report, classes, steps)


def _class_column(config: Config, train: datasets.Dataset, column: str) -> str:
    """Return the column to count by: the partition's, or else the label; "" if none."""
    if config.partition_scheme in BY_COLUMN and config.partition_scheme != "natural":
        return column
    fallback = column if config.partition_scheme != "natural" else ""
    return next((name for name in ("label", fallback) if name in train.column_names), "")


def count_examples(
    train: datasets.Dataset,
    parts: Sequence[np.ndarray],
    classes: str,
    labels: Sequence[str],
    names: str = "",
) -> PartitionReport:
    """Count the examples of each part, by the column `classes` if there is one.

    `labels` are the names of labels that are numbers. The column `names` has the clients' names.
    """
    number = sum(map(len, parts))
    owners = np.repeat(np.arange(len(parts)), [len(rows) for rows in parts])
    ids, class_names = np.zeros(number, np.int64), [""]
    if classes:
        values, row_classes = numbered(read_values(train, classes))
        class_names = [_read_name(train, classes, value, labels) for value in values]
        ids = row_classes[np.concatenate(parts)]
    counts = np.bincount(owners * len(class_names) + ids, minlength=len(parts) * len(class_names))
    clients = train[names][:] if names else []
    return PartitionReport(
        counts.reshape(len(parts), len(class_names)),
        tuple(class_names) if classes else (),
        tuple(_read_name(train, names, clients[rows[0]], labels) for rows in parts if clients),
        len(train) - number,
    )


def _read_name(
    train: datasets.Dataset, column: str, value: str | float, labels: Sequence[str]
) -> str:
    """Return the name of a class or a client, whose value may be a number."""
    feature = train.features[column]
    if isinstance(feature, datasets.ClassLabel):
        return str(feature.names[int(value)])
    if column == "label" and type(value) is int and 0 <= value < len(labels):
        return labels[value]
    return str(value)


def as_text(assigned: Assignment) -> str:
    """Format a partition report for a terminal."""
    report, config = assigned.report, assigned.config
    by = f", counted by {plain(assigned.classes, NAME)!r}" if report.classes else ""
    lines = [
        f"partition       {config.partition}: {len(report.sizes):,} clients, "
        f"{report.sizes.sum():,} examples{by}",
        f"examples each   {_range(report.sizes)}",
    ]
    if report.unassigned:
        lines.append(f"unassigned      {report.unassigned:,} examples, which were left over")
    if report.classes:
        class_counts = np.count_nonzero(report.counts, axis=1)
        lines += [
            f"classes each    {_range(class_counts)}, of {len(report.classes):,}",
            f"label skew      {report.skew:.2f} (0: equal class fractions, towards 1: no class in "
            "common)",
        ]
    lines.append(f"steps a round   {_range(assigned.steps)}")
    if config.validation_share:
        lines.append(f"validation      {config.validation_share:g} of them, to evaluate on")
    return "\n".join([*lines, "", *_table(assigned)])


def _range(numbers: np.ndarray) -> str:
    low, middle, high = numbers.min(), np.median(numbers), numbers.max()
    if low == high:
        return f"{low:,}"
    return f"{low:,} to {high:,}, median {middle:,.10g}"


def _table(assigned: Assignment) -> list[str]:
    """Return a line for each client, or for the first of many, with its examples by class."""
    report, number = assigned.report, len(assigned.report.sizes)
    lines = [f"the first {ROWS} of {number:,} clients:"] if number > ROWS else []
    clients = np.arange(min(number, ROWS))
    frame = pd.DataFrame({"client": clients, "all": report.sizes[clients]})
    few = len(report.classes) <= CLASSES
    for number in range(len(report.classes) if few else 0):
        frame[str(number)] = [str(count or ".") for count in report.counts[clients, number]]
    if report.names:
        frame["name"] = [plain(report.names[client], NAME) for client in clients]
    lines.append(frame.to_string(index=False))
    if not few:
        lines.append(f"{len(report.classes)} classes are too many for columns")
    elif [*report.classes] != [str(number) for number in range(len(report.classes))]:
        named = (f"{number} {plain(name, NAME)}" for number, name in enumerate(report.classes))
        lines.append(f"classes: {', '.join(named)}")
    return lines
