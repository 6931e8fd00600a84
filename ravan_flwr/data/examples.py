"""Load a data set: split it into train and test, rename columns to roles, determine its labels."""

import functools
import glob
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import numpy as np

from ravan_flwr.data.hub import (
    TABLES,
    as_files,
    cache_folder,
    check_encoding,
    csv_options,
    every_split,
    hub_errors,
    load_data,
    no_bars,
    visible_files,
)
from ravan_flwr.data.rows import IMAGES, list_some, match_columns
from ravan_flwr.specs import DataSpec

log = logging.getLogger(__name__)


def load_splits(spec: DataSpec) -> datasets.DatasetDict:
    """Load `train` and the server's test splits, with columns named by role.

    The splits are the same on every machine.
    """
    splits, data = SOURCES[spec.source](spec), f"data {spec.name or spec.source}"
    if not any(name in splits for name, _ in spec.tests):
        splits = _split_off_test(splits, spec, data)
    columns = splits["train"].column_names
    result = datasets.DatasetDict(
        {name: by_role(split, spec, f"{data}, {name}") for name, split in splits.items()}
    )
    for role, column in spec.columns:
        if column != role and column not in columns:
            log.warning("%s: got no column %r, so %r is read, its role", data, column, role)
    return result


def other_examples(spec: DataSpec) -> tuple[datasets.Dataset, str]:
    """Load labelled examples of other data than the run's; return them and the names of the splits.

    The splits are those that the spec names as tests, or else `test`, or else all. Columns and
    labels are treated as by `load_splits`.
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
    return by_role(examples, spec, data), name


def device_examples(path: str, spec: DataSpec) -> datasets.Dataset:
    """Read a device's folder: images in one folder per label, parquet, CSV or JSON lines."""
    folder = Path(path).expanduser()
    where = f"node config: data-path = {path!r}"
    if not folder.is_absolute() or not folder.exists():
        raise ValueError(
            f"{where}: found no such folder, expected the absolute path of one on this device; "
            "change it in the node config"
        )
    by_loader: dict[str, list[str]] = {}
    files = visible_files(folder)
    for file in files:
        if loader := _LOADERS.get(file.suffix.lower()):
            by_loader.setdefault(loader, []).append(str(file))
    if "imagefolder" in by_loader:  # a metadata.csv or .jsonl may accompany the images
        by_loader = {"imagefolder": by_loader["imagefolder"]}
    if len(by_loader) != 1:
        found = " and ".join(sorted(by_loader)) or f"{len(files)} files of other kinds"
        raise ValueError(
            f"{where}: got {found}, expected images, parquet, CSV or JSON lines, and one kind of "
            "them; take the others out"
        )
    ((loader, names),) = by_loader.items()
    cache = str(cache_folder(folder, files))
    source: dict[str, Any] = {"data_files": [glob.escape(name) for name in names]}
    if loader == "imagefolder":  # the folder's name is the label, even if there is only one folder
        pattern = glob.escape(str(folder)) + "/**" * folder.is_dir()
        source = {"data_files": pattern, "drop_labels": False}
    elif loader == "csv":
        source |= csv_options([*map(Path, names)])
    with hub_errors("data", str(folder), where=where):
        examples = datasets.load_dataset(loader, split="train", cache_dir=cache, **source)
    if not len(examples):
        raise ValueError(f"{where}: got no example, expected some; fill it")
    check_encoding(examples, where)
    return by_role(as_files(examples), spec, where)


def _sklearn_digits(_: DataSpec) -> datasets.DatasetDict:
    """Load scikit-learn's 1,797 handwritten 8 x 8 digits, split into 80 % train and 20 % test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (only this source needs it)

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    classes = datasets.ClassLabel(names=[str(digit) for digit in range(10)])
    features = datasets.Features(image=datasets.Array2D((8, 8), "float32"), label=classes)
    test = _stratified_mask(labels, 0.2)
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict({"image": images[at], "label": labels[at]}, features)
            for name, at in (("train", ~test), ("test", test))
        }
    )


def _split_off_test(
    splits: datasets.DatasetDict, spec: DataSpec, data: str
) -> datasets.DatasetDict:
    """Split a part of `train` off as the server's test split, the same on every machine."""
    train, label = splits["train"], spec.column("label")
    column = next((name for name in (label, "label") if name in train.column_names), None)
    classes = np.zeros(len(train)) if column is None else np.asarray(list(map(str, train[column])))
    test = test_mask(classes, spec.test_share, data)
    log.info(
        "%s: it has no split `test`: %d of its %d examples become the server's test split",
        data, test.sum(), len(test),
    )  # fmt: skip
    ((name, _),) = spec.tests
    rows = {"train": np.flatnonzero(~test), name: np.flatnonzero(test)}
    with no_bars():
        return datasets.DatasetDict(
            {name: train.select(indices).flatten_indices() for name, indices in rows.items()}
        )


def test_mask(classes: np.ndarray, share: float, data: str) -> np.ndarray:
    """Return the mask of the examples of the test split: the fraction `share` of each class.

    It is a fraction of all examples if every class is too small.
    """
    test = _stratified_mask(classes, share)
    if not test.any():
        test = _stratified_mask(np.zeros(len(classes)), share)
    if test.all() or not test.any():
        raise ValueError(
            f"{data}: it has no split `test`, and of its {len(test)} examples none can be "
            f"taken for it (test-share = {share:g}), expected several of a class; add examples, or "
            "a split test"
        )
    return test


def _stratified_mask(labels: np.ndarray, share: float) -> np.ndarray:
    """Return a mask of the fraction `share` of each class, always the same.

    `datasets` would process the examples row by row.
    """
    random = np.random.default_rng(0)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(len(rows) * share)]] = True
    return chosen


_LOADERS = TABLES | dict.fromkeys(IMAGES, "imagefolder")
SOURCES = {"sklearn-digits": _sklearn_digits, "hub": load_data}


def by_role(examples: datasets.Dataset, spec: DataSpec, where: str) -> datasets.Dataset:
    """Rename columns to their roles, and drop all others but the one to partition by.

    A column may have its name from the preset, or its role as name already.
    """
    columns, partition_column = dict(spec.columns), spec.partition_by
    names = match_columns(examples.column_names, columns, where)
    selection = dict.fromkeys(names.values())
    if partition_column not in columns and partition_column in examples.column_names:
        selection[partition_column] = None
    renamed = {name: role for role, name in names.items() if name != role}
    return examples.select_columns([*selection]).rename_columns(renamed)


_WHOLE_NUMBERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64", "bool")


@functools.cache
def _warn_of_places(where: str, first: str) -> None:
    """Log it once: examples may be encoded one by one."""
    log.warning("%s: got whole numbers, taken as places in the list: 0 is %r", where, first)


def label_numbers(examples: datasets.Dataset, labels: Sequence[str], where: str) -> np.ndarray:
    """Return the index of each example's label in `labels`.

    Texts, booleans and numbered classes are looked up by name, and so are whole numbers if one of
    them is a name in `labels`. Otherwise they are the indices, and must be in range.
    """
    feature = examples.features["label"]
    if not isinstance(feature, datasets.Value | datasets.ClassLabel):
        raise ValueError(
            f"{where}: got {type(feature).__name__} values, expected texts, numbers or classes; "
            "name another column"
        )
    column = examples["label"][:]
    if isinstance(feature, datasets.Value) and (missing := column.count(None)):
        raise ValueError(
            f"{where}: {missing} examples have no label, expected one each; take them out"
        )
    if isinstance(feature, datasets.ClassLabel):
        column = [None if n is None or n < 0 else feature.names[n] for n in column]
    elif feature.dtype == "bool":  # no indices, although True == 1
        column = [name if (name := str(value)) in labels else name.lower() for value in column]
    elif feature.dtype in _WHOLE_NUMBERS and any(str(value) in labels for value in column):
        column = [str(value) for value in column]
    if column and isinstance(column[0], int):
        _warn_of_places(where, labels[0])
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
            f"{where}: got unknown labels {list_some(wrong)}; expected {expected}; add them to the "
            "labels of the preset, rename them, or take the examples out"
        )
    return numbers


MAX_CLASSES = 10_000  # a column with more values than that is not a label column


def with_labels(spec: DataSpec) -> DataSpec:
    """Return the spec with the labels of its data, on every machine the same, if it has none."""
    if spec.labels_known:
        return spec
    splits = load_splits(spec)
    return replace(spec, labels=find_labels(splits, f"data {spec.name or spec.source}"))


def find_labels(splits: datasets.DatasetDict, where: str) -> tuple[str, ...]:
    """Return the names of the classes: of a ClassLabel or of folders, or else the sorted values."""
    feature = splits["train"].features["label"]
    numbered = isinstance(feature, datasets.ClassLabel)
    names = feature.names if numbered else _sorted_values(splits, feature, where)
    if len(names) < 2:
        raise ValueError(
            f"{where}: got {len(names)} class{'es' * (len(names) != 1)} "
            f"({', '.join(names) or 'none'}), expected two at least; add examples of another one"
        )
    return tuple(names)


def _sorted_values(splits: datasets.DatasetDict, feature: Any, where: str) -> list[str]:
    """Return the different values of the labels: numbers in order of size, texts in text order."""
    dtype = getattr(feature, "dtype", "list")
    if dtype not in ("string", "large_string", *_WHOLE_NUMBERS):
        raise ValueError(
            f"{where}: the labels are of the type {dtype}, expected texts, or whole numbers; "
            "convert them"
        )
    classes = {value for split in splits.values() for value in split.unique("label")}
    if None in classes:
        raise ValueError(f"{where}: some examples have no label, expected one each; take them out")
    if len(classes) > MAX_CLASSES:
        raise ValueError(
            f"{where}: the label column has {len(classes):,} different values, expected classes, "
            f"{MAX_CLASSES:,} at most; name another column"
        )
    return [str(value) for value in sorted(classes)]
