"""Read a column by which simulated clients differ, whatever a data set has in it."""

from collections.abc import Sequence
from contextlib import suppress

import datasets
import numpy as np

from ravan_flwr.data.examples import SOURCES
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


def numbered(values: Sequence[str | float]) -> tuple[list[str | float], np.ndarray]:
    """List the different values in their order, and number each value by its place there.

    Not by NumPy: there a text with a zero at its end is the same as one without, and every text
    takes as much room as the longest.
    """
    different = sorted(set(values))
    place = {value: number for number, value in enumerate(different)}
    return different, np.fromiter((place[value] for value in values), np.int64, len(values))


def rows_by_number(numbers: np.ndarray, count: int) -> list[np.ndarray]:
    """List the rows of each number below `count`, in their order."""
    order = np.argsort(numbers, kind="stable")
    return np.split(order, np.bincount(numbers, minlength=count).cumsum()[:-1])
