"""Load a data set: split it into train and test, name its columns by role, settle its labels."""

import glob
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ravan_flwr.data.hub import (
    CSV,
    TABLES,
    as_files,
    cache_of,
    check_encoding,
    every_split,
    load_data,
    no_bars,
    telling,
    visible_files,
)
from ravan_flwr.data.rows import IMAGES, match_columns
from ravan_flwr.specs import DataSpec

log = logging.getLogger(__name__)


def load_splits(spec: DataSpec) -> datasets.DatasetDict:
    """Load `train` and the server's test splits, the same on every machine, columns by role."""
    splits, data = SOURCES[spec.source](spec), f"data {spec.name or spec.source}"
    if not any(name in splits for name, _ in spec.tests):
        splits = _hold_back(splits, spec, data)
    return _called(splits, spec, data)


def other_examples(spec: DataSpec) -> tuple[datasets.Dataset, str]:
    """Load labelled examples that a run has not seen, as `load_splits`, and say which splits.

    Those are the splits that the spec names as tests, or else `test`, or else all.
    """
    data = f"data {spec.name}"
    splits = every_split(spec.name, spec.subset, spec.revision, foreign=True)
    tests = [split for _, split in spec.tests]
    fallback = ["test"] if "test" in splits else [*splits]
    chosen = tests if set(tests) <= set(splits) else fallback
    examples = datasets.concatenate_datasets([splits[split] for split in chosen])
    check_encoding(examples, data)
    is_all = chosen == [*splits] and not {"train", spec.train}.isdisjoint(chosen)
    name = "all examples" if is_all else " and ".join(chosen)
    examples = _called(datasets.DatasetDict({name: examples}), spec, data)[name]
    feature = examples.features.get("label")
    whole_numbers = isinstance(feature, datasets.Value) and feature.dtype in _WRITTEN
    if whole_numbers and not any(str(value) in spec.labels for value in examples["label"]):
        log.warning(
            "%s: its labels are numbers, taken as positions: 0 is %r, 1 is %r",
            data,
            *spec.labels[:2],
        )
    return examples, name


def own_examples(path: str, spec: DataSpec) -> datasets.Dataset:
    """Read a device's folder: images in a folder a label, parquet, CSV, JSON lines."""
    folder = Path(path).expanduser()
    where = f"node config: data-path = {path!r}"
    if not folder.is_absolute() or not folder.exists():
        raise ValueError(
            f"{where}: found no such folder, expected the absolute path of one on this device; "
            "correct it"
        )
    by_kind: dict[str, list[str]] = {}
    files = visible_files(folder)
    for file in files:
        if kind := _KINDS.get(file.suffix.lower()):
            by_kind.setdefault(kind, []).append(str(file))
    if "imagefolder" in by_kind:  # a metadata.csv or .jsonl may stand beside the images
        by_kind = {"imagefolder": by_kind["imagefolder"]}
    if len(by_kind) != 1:
        kinds = " and ".join(sorted(by_kind)) or f"{len(files)} files of other kinds"
        raise ValueError(
            f"{where}: got {kinds}, expected images, parquet, CSV or JSON lines, and one kind of "
            "them; take the others out"
        )
    ((kind, names),) = by_kind.items()
    source: dict[str, Any] = {"data_files": [glob.escape(name) for name in names]}
    if kind == "imagefolder":  # a label by its folder, be there one or many, whatever its name
        pattern = glob.escape(str(folder)) + "/**" * folder.is_dir()
        source = {"data_files": pattern, "drop_labels": False}
    elif kind == "csv":
        source |= CSV
    cache = str(cache_of(folder, files))
    with telling("data", str(folder), at=where):
        examples = datasets.load_dataset(kind, split="train", cache_dir=cache, **source)
    if not len(examples):
        raise ValueError(f"{where}: got no example, expected some; fill it")
    check_encoding(examples, where)
    return by_role(as_files(examples), spec, where)


def _sklearn_digits(_: DataSpec) -> datasets.DatasetDict:
    """Load scikit-learn's 1,797 handwritten 8 x 8 digits, 80 % to train and 20 % to test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (only this source needs it)

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    features = datasets.Features(
        {
            "image": datasets.Array2D((8, 8), "float32"),
            "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
    )
    test = _share_of_each_class(labels, 0.2)
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {"image": images[rows], "label": labels[rows]}, features=features
            )
            for name, rows in (("train", ~test), ("test", test))
        }
    )


def _hold_back(splits: datasets.DatasetDict, spec: DataSpec, data: str) -> datasets.DatasetDict:
    """Take a share of `train` for the server's test, the same on every machine."""
    train, label = splits["train"], spec.column("label")
    column = next((name for name in (label, "label") if name in train.column_names), None)
    classes = np.zeros(len(train)) if column is None else np.asarray(list(map(str, train[column])))
    test = mask_of_test(classes, spec.test_share, data)
    log.info(
        "%s: it has no split `test`: %d of its %d examples become the server's test split",
        data,
        test.sum(),
        len(test),
    )
    ((name, _),) = spec.tests
    rows = {"train": np.flatnonzero(~test), name: np.flatnonzero(test)}
    with no_bars():
        return datasets.DatasetDict(
            {name: train.select(indices).flatten_indices() for name, indices in rows.items()}
        )


def mask_of_test(classes: np.ndarray, share: float, data: str) -> np.ndarray:
    """Mask the examples that are held back for the test: a share of each class.

    Where all classes are too small for that, it is a share of the whole.
    """
    test = _share_of_each_class(classes, share)
    if not test.any():
        test = _share_of_each_class(np.zeros(len(classes)), share)
    if test.all() or not test.any():
        raise ValueError(
            f"{data}: it has no split `test`, and of its {len(test)} examples none can be "
            f"taken for it (test-share = {share:g}), expected several of a class; add examples, or "
            "a split test"
        )
    return test


def _share_of_each_class(labels: np.ndarray, share: float) -> np.ndarray:
    """Mask a share of each class, the same always; `datasets` would go through them row by row."""
    random = np.random.default_rng(0)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(len(rows) * share)]] = True
    return chosen


_KINDS = TABLES | dict.fromkeys(IMAGES, "imagefolder")
SOURCES = {"sklearn-digits": _sklearn_digits, "hub": load_data}


def by_role(examples: datasets.Dataset, spec: DataSpec, where: str) -> datasets.Dataset:
    """Call columns by what they are for, and leave out the others.

    A column may be called as in the preset, or by its role already.
    """
    columns, partition_column = dict(spec.columns), spec.partition_by
    names = match_columns(examples.column_names, columns, where)
    selection = dict.fromkeys(names.values())
    if partition_column not in columns and partition_column in examples.column_names:
        selection[partition_column] = None
    renamed = {name: role for role, name in names.items() if name != role}
    return examples.select_columns([*selection]).rename_columns(renamed)


def _by_number(
    examples: datasets.Dataset, labels: Sequence[str], where: str
) -> tuple[datasets.Dataset, Mapping[int, str]]:
    """Call numbered classes as in the preset; return the examples, and the names that differed.

    Where the preset knows all names there is nothing to do: names are looked up. A name that
    both know must have one number. Classes that `datasets` makes of folders are sorted by their
    names, so that their numbers say nothing: what is unknown of these is an error later on.
    """
    feature = examples.features.get("label") if labels else None
    by_folder = examples.info.builder_name == "imagefolder"
    if not isinstance(feature, datasets.ClassLabel) or by_folder or {*feature.names} <= {*labels}:
        return examples, {}
    names = dict(enumerate(feature.names))
    if len(names) != len(labels):
        raise ValueError(
            f"{where}: got {len(names)} classes, {some_of(feature.names)}; expected the preset's "
            f"{len(labels)}, {some_of(labels)}; take other data, or a preset with these labels"
        )
    different = {number: name for number, name in names.items() if name != labels[number]}
    if moved := [name for name in different.values() if name in labels]:
        raise ValueError(
            f"{where}: got the classes {some_of(feature.names)}: some are unknown, and "
            f"{some_of(moved)} have other numbers than in the preset; expected {some_of(labels)}, "
            "in this order; take other data, or a preset with these labels"
        )
    called = datasets.ClassLabel(names=list(labels))
    return examples.cast_column("label", called), different


def _called(splits: datasets.DatasetDict, spec: DataSpec, data: str) -> datasets.DatasetDict:
    """Name columns by role, and numbered classes as in the preset; warn of names that differ."""
    differing: dict[int, str] = {}
    for name, split in splits.items():
        where = f"{data}, {name}"
        splits[name], different = _by_number(by_role(split, spec, where), spec.labels, where)
        differing |= different
    if differing:
        pairs = [f"{number} {name!r}, {spec.labels[number]!r} here"
                 for number, name in differing.items()]  # fmt: skip
        log.warning(
            "%s: classes are identified by their numbers, since some have other names than in the "
            "preset: %s",
            data,
            some_of(pairs),
        )
    return splits


def some_of(names: Sequence[object], most: int = 20) -> str:
    """List the first few names or numbers."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


_WRITTEN = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


def label_numbers(examples: datasets.Dataset, labels: Sequence[str], where: str) -> np.ndarray:
    """Number the examples' labels: names are looked up, numbers must be in range.

    Of a numbered class the name counts: `load_splits` has settled whose names those are. So does a
    number that is the name of a class.
    """
    feature = examples.features["label"]
    if not isinstance(feature, datasets.Value | datasets.ClassLabel):
        raise ValueError(
            f"{where}: got {type(feature).__name__} values, expected texts, numbers or classes; "
            "name another column"
        )
    column = examples["label"][:]
    if isinstance(feature, datasets.Value) and (few := column.count(None)):
        raise ValueError(f"{where}: {few} examples have no label, expected one each; take them out")
    if isinstance(feature, datasets.ClassLabel):
        column = [feature.names[number] if number >= 0 else None for number in column]
    elif feature.dtype in _WRITTEN and any(str(value) in labels for value in column):
        column = [str(value) for value in column]
    if column and isinstance(column[0], int):
        numbers = np.asarray(column)
        wrong = sorted(set(numbers[(numbers < 0) | (numbers >= len(labels))].tolist()))
        expected = f"numbers from 0 to {len(labels) - 1}"
    else:
        number_of = {name: number for number, name in enumerate(labels)}
        wrong = sorted({str(name) for name in column if name not in number_of})
        numbers = np.asarray([number_of.get(name, -1) for name in column])
        expected = ", ".join(labels)
    if wrong:
        raise ValueError(
            f"{where}: got unknown labels {some_of(wrong)}; expected {expected}; rename them, or "
            "take the examples out"
        )
    return numbers


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
    classes = set(values)
    if len(classes) > MOST:
        raise ValueError(
            f"{where}: the label column has {len(classes):,} different values, expected classes, "
            f"{MOST:,} at most; name another column"
        )
    return tuple(str(value) for value in sorted(classes))
