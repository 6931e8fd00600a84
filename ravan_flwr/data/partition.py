"""Partition a shared data set among simulated clients, as a run config says.

A device with its own examples never comes here.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

import datasets
import numpy as np

from ravan_flwr.data.examples import SOURCES
from ravan_flwr.data.partitioning import (
    DRAWS,
    SIZES,
    check_number,
    numbered,
    partition_by_class,
    partition_by_client,
    partition_by_size,
    partition_evenly,
    partition_few_classes,
    partition_naturally,
    partition_shards,
)
from ravan_flwr.seeding import derive
from ravan_flwr.specs import DataSpec


def column_of(spec: DataSpec) -> str:
    """Find what the column to divide by is called once columns are called by role."""
    roles = {column: role for role, column in spec.columns}
    by = spec.partition_by
    return by if by in roles.values() else roles.get(by, by)


def check_column(spec: DataSpec, examples: datasets.Dataset) -> None:
    """Raise ValueError, with the columns of the data itself, if there is none to divide by."""
    column = column_of(spec)
    if column in examples.column_names:
        return
    whole = SOURCES[spec.source](spec)["train"]  # read once more: `examples` has what is used
    lacks = "the task has no label" if column == "label" else "the data has no such column"
    names = []
    for name in whole.column_names:
        with suppress(ValueError):
            names += [repr(name)] if values_of(whole, name) else []
    usable = ", ".join(names)
    has = f"that has a value for each example: {usable}" if usable else "(none of them will do)"
    raise ValueError(
        f"partition: got the column {spec.partition_by!r}: {lacks}, expected a column of "
        f"the data {has}; name one, as partition=dirichlet:0.3:COLUMN, or choose a partition that "
        "reads none, such as iid"
    )


def values_of(examples: datasets.Dataset, column: str) -> list[str | float]:
    """Return the value of each example; ValueError if one has none, or values are no names."""
    if column not in examples.column_names:
        raise ValueError(
            f"partition: got the column {column!r}: the examples have "
            f"{examples.column_names}, expected one of them, or another column of the "
            "data set; correct it"
        )
    feature = examples.features[column]
    plain = isinstance(feature, datasets.Value) and not feature.dtype.endswith("binary")
    if not plain and not isinstance(feature, datasets.ClassLabel):
        raise ValueError(
            f"partition: got the column {column!r}: it holds {type(feature).__name__} values, "
            "expected texts, numbers or classes; name another column"
        )
    values: list[str | float] = examples[column][:]
    is_class = isinstance(feature, datasets.ClassLabel)  # of which -1 is none
    lacking = [
        row
        for row, value in enumerate(values)
        if value is None or value != value or (is_class and int(value) < 0)  # noqa: PLR0124 (NaN)
    ]
    if lacking:
        raise ValueError(
            f"partition: got the column {column!r}: {len(lacking):,} of {len(values):,} examples "
            "have no value there (None, NaN, or class -1), the first of them example "
            f"{lacking[0]}; expected one for each; fill them in, or take these examples out"
        )
    return values


SEEDS = 20  # that are tried, one after the other, until every client has enough

log = logging.getLogger(__name__)

Values = Sequence[str | float]  # of the column, where it is read


@dataclass(frozen=True)
class Partition:
    """Say how simulated clients share the training examples."""

    kind: str  # the first word of `partition`
    amount: float  # alpha of a Dirichlet distribution, or classes or shards of a client
    number: int
    seed: int


def partition_rows(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """Partition the rows of `train` among the clients.

    Where only the number of examples counts, no column is read.
    """
    check_number(partition.number, len(train))
    values = values_of(train, column) if partition.kind in BY_COLUMN else range(len(train))
    random = np.random.default_rng(_seed(partition))
    parts = PARTITIONERS[partition.kind](values, partition, random, column)
    if left := len(train) - sum(map(len, parts)):
        log.info(
            "partition=%s: %d of %d examples belong to no client", partition.kind, left, len(train)
        )
    return parts


def _seed(partition: Partition) -> int:
    return derive(partition.seed, "partition") % 2**32


def _dirichlet(values: Values, partition: Partition, *_: object) -> list[np.ndarray]:
    """Split every class over the clients by a draw from a Dirichlet distribution.

    Clients differ in what they have, and widely in how much. Draws that leave a client with next to
    nothing are repeated, as flwr-datasets does ten times a seed, then with further seeds.
    """
    labels, clients, alpha = numbered(values)[1], partition.number, partition.amount
    least = max(1, min(10, len(values) // (4 * clients)))
    for attempt in range(SEEDS):
        random = np.random.default_rng(_seed(partition) + attempt)
        parts = partition_by_class(labels, clients, alpha, least, random)
        if parts is not None:
            return parts
    raise ValueError(
        f"partition = 'dirichlet:{alpha:g}': {clients} clients got fewer than {least} of "
        f"{len(values)} examples in every of {SEEDS * DRAWS} draws; raise alpha, use fewer "
        "clients, or partition=dirichlet-by-client"
    )


# By the first word of `partition`. `by` is the partition, `r` the generator, `c` the column.
PARTITIONERS: dict[str, Callable[..., list[np.ndarray]]] = {
    "iid": lambda values, by, r, _: partition_evenly(len(values), by.number, r),
    "dirichlet": _dirichlet,
    "dirichlet-by-client": lambda values, by, r, _: partition_by_client(
        numbered(values)[1], by.number, by.amount, r
    ),
    "natural": lambda values, by, _, c: partition_naturally(values, by.number, c),
    "pathological": lambda values, by, r, _: partition_few_classes(
        values, by.number, int(by.amount), r
    ),
    "shards": lambda values, by, r, _: partition_shards(values, by.number, int(by.amount), r),
    **dict.fromkeys(
        SIZES, lambda values, by, r, _: partition_by_size(by.kind, len(values), by.number, r)
    ),
}
BY_COLUMN = ("dirichlet", "dirichlet-by-client", "natural", "pathological", "shards")
