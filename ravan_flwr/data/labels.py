"""Find the classes of a data set that its preset does not name."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import datasets

from ravan_flwr.data.examples import load_splits
from ravan_flwr.specs import DataSpec

MOST = 10_000  # more values than that are no classes


def settled(spec: DataSpec) -> DataSpec:
    """Fill in the labels, the same on every machine, where the preset leaves them to the data."""
    if spec.settled:
        return spec
    splits = load_splits(spec)
    return replace(spec, labels=labels_of(splits, f"data {spec.name or spec.source}"))


def labels_of(splits: datasets.DatasetDict, where: str) -> tuple[str, ...]:
    """List the classes: those of a ClassLabel or of folders, or else the sorted values."""
    feature = splits["train"].features["label"]
    if isinstance(feature, datasets.ClassLabel):
        names = tuple(feature.names)
    else:
        names = _values((value for split in splits.values() for value in split["label"]), where)
    if len(names) < 2:
        raise ValueError(
            f"{where}: got {len(names)} class{'es' * (len(names) != 1)} "
            f"({', '.join(names) or 'none'}), expected two at least; add examples of another one"
        )
    return names


def _values(values: Iterable[Any], where: str) -> tuple[str, ...]:
    """Sort the values of a column: numbers as numbers, everything else as text."""
    values = list(values)
    kinds = {type(value) for value in values}
    if None in values:
        missing = sum(value is None for value in values)
        raise ValueError(
            f"{where}: {missing} examples have no label, expected one each; take them out"
        )
    if len(kinds) > 1 or not kinds <= {str, int, bool}:
        shown = ", ".join(sorted(kind.__name__ for kind in kinds))
        raise ValueError(
            f"{where}: the labels are of the types {shown}, expected texts, or whole numbers; "
            "bring them into one form"
        )
    found = set(values)
    if len(found) > MOST:
        raise ValueError(
            f"{where}: the label column has {len(found):,} different values, expected classes, "
            f"{MOST:,} at most; name another column"
        )
    return tuple(str(value) for value in sorted(found))
