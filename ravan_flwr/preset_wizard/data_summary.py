"""Summarise a data set: its files, columns, classes and splits."""

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np

from ravan_flwr.config.presets import parse_location
from ravan_flwr.data.examples import labels_of, some_of, test_mask
from ravan_flwr.data.hub import check_encoding, every_split, visible_files
from ravan_flwr.data.idx import is_idx
from ravan_flwr.preset_wizard.columns import PAIR, NamedColumns, find_columns, prompts_for
from ravan_flwr.specs import DataSpec

log = logging.getLogger(__name__)

TESTS = (
    "test",
    "validation",
    "dev",
    "valid",
)  # names of a test split; the first that exists is used
_KINDS = {"json": "JSON lines", "csv": "CSV", "parquet": "parquet", "imagefolder": "images"}


@dataclass(frozen=True)
class DataSummary:
    """A data set's specification, files, classes and splits."""

    spec: DataSpec
    kind: str  # of the files
    counts: Mapping[str, Mapping[str, int]]  # split -> class -> examples
    test_from_train: bool  # there is no test split, so a part of `train` is the test
    unused: Sequence[str]  # splits that are not used
    train: datasets.Dataset

    @property
    def is_image(self) -> bool:
        return bool(self.spec.column("image"))

    @property
    def is_preference(self) -> bool:
        """Return whether each example has an answer that is preferred to another."""
        return bool(self.spec.column("rejected"))

    @property
    def is_language(self) -> bool:
        """Return whether the examples are for a language model: they have no labels."""
        return not self.spec.column("label")

    def number(self, split: str) -> int:
        """Return the number of examples of a split."""
        return sum(self.counts[split].values())

    def warnings(self) -> list[str]:
        """Return warnings of classes without examples to train or test on."""
        train, test = self.counts["train"], self.counts["test"]
        warnings = []
        if empty := [name for name in self.spec.labels if not train.get(name)]:
            warnings.append(
                f"{len(empty)} of the classes have no example to train on: {some_of(empty, 8)}"
                + ("; the test has some" if any(test.get(name) for name in empty) else "")
            )
        if untested := [n for n in self.spec.labels if not test.get(n) and train.get(n)]:
            warnings.append(
                f"{len(untested)} of the classes have no example to test on: {some_of(untested, 8)}"
            )
        return warnings


def summarise_data(
    location: str, subset: str, names: NamedColumns, chat_template: str = ""
) -> DataSummary:
    """Load a data set and return its summary."""
    name, revision = parse_location("data", location)
    if Path(name).is_dir():  # the preset is used from other folders, too
        name = str(Path(name).resolve())
    where = f"data {location}"
    if not Path(name).exists():
        log.info("%s: there is no such folder here; asking the Hugging Face Hub", where)
    _check_names(Path(name), where)
    splits = every_split(name, subset, revision)
    for split_name, split in splits.items():
        check_encoding(split, f"{where}, {split_name}")
    if "train" not in splits and (len(splits) != 1 or "test" in splits):
        raise ValueError(
            f"{where}: got the splits {', '.join(splits)}, expected one that is called train; "
            "rename the file or the folder that clients are to train on to train"
        )
    train_name = "train" if "train" in splits else str(next(iter(splits)))
    train = splits[train_name]
    columns = find_columns(train, names, where)
    label = columns.get("label", "")  # none for a language model
    if chat_template and not {"messages", *PAIR} & set(columns):
        raise ValueError(
            f"--chat-template: {where} has no column of conversations, which it writes, expected "
            "messages; leave it out"
        )
    test_name = _test_split(splits, train_name, label, where)
    used = {"train": train} | ({"test": splits[test_name]} if test_name else {})
    _check_complete(used, columns, where)
    labels: tuple[str, ...] = ()
    if label:
        renamed = {label: "label"} if label != "label" else {}
        column = {n: s.select_columns([label]).rename_columns(renamed) for n, s in used.items()}
        labels = labels_of(datasets.DatasetDict(column), where)
    spec = DataSpec(
        "hub",
        name,
        subset=subset,
        revision=revision,
        train=train_name,
        tests=(("test", test_name or "test"),),
        columns=tuple(columns.items()),
        labels=labels,
        prompts=prompts_for(columns),
        chat_template=chat_template,
    )
    return DataSummary(
        spec,
        kind=_KINDS.get(str(train.info.builder_name), str(train.info.builder_name or "a data set"))
        if Path(name).is_dir()
        else "of the hub",
        counts=_counts(used, label, spec, where),
        test_from_train=not test_name,
        unused=[split for split in splits if split not in (train_name, test_name)],
        train=train,
    )


def _check_names(folder: Path, where: str) -> None:
    """Raise ValueError for files without names of columns or classes."""
    if is_idx(folder):
        raise ValueError(
            f"{where}: got IDX files, whose classes have numbers and no names, expected images in "
            "a folder for each class, or a table; for these write a preset by hand, after "
            "conf/fashion-vit.yaml, with your labels and your model"
        )
    paths = visible_files(folder) if folder.is_dir() else []
    if paths and all(file.suffix.lower() == ".txt" for file in paths):
        names = [str(file.relative_to(folder)) for file in paths]
        raise ValueError(
            f"{where}: got {some_of(names, 5)}, which has no columns, expected CSV, JSON lines or "
            "parquet (train.csv, test.csv), or images in a folder for each class "
            "(train/CLASS/*.png); write the texts with their labels into one of these"
        )


def _test_split(splits: datasets.DatasetDict, train: str, label: str, where: str) -> str:
    """Return the server's test split, the first usual name with published labels; "" for none."""
    for name in TESTS:
        if not label and name in splits and name != train:
            return name
        if name in splits and name != train and label in splits[name].column_names:
            values = splits[name][label][:]
            if any(value not in (None, -1) for value in values):
                return name
    if label and "test" in splits and train != "test":
        raise ValueError(
            f"{where}: the examples of its split test have no labels, and it has no split "
            "validation, expected one with labels; remove test, and a part of train is the test"
        )
    return ""


def _check_complete(
    splits: Mapping[str, datasets.Dataset], columns: Mapping[str, str], where: str
) -> None:
    """Raise ValueError, with the rows, for examples without a text or a label."""
    nouns = {"text": "text", "text-pair": "text", "label": "label"}
    for name, split in splits.items():
        for role, noun in nouns.items():
            column = columns.get(role)
            values = split[column] if column else []
            numbered = column and isinstance(split.features[column], datasets.ClassLabel)
            empty = (None, -1) if numbered else (None, "")
            if missing := [row for row, value in enumerate(values, 1) if value in empty]:
                raise ValueError(
                    f"{where}, {name}: {len(missing)} of {len(split)} examples have nothing in "
                    f"column {column!r} (row {some_of(missing)}), expected a {noun} in each; "
                    "remove them"
                )


def _counts(
    splits: Mapping[str, datasets.Dataset], column: str, spec: DataSpec, where: str
) -> dict[str, Counter[str]]:
    """Return the numbers of examples by split and class; without a test, `train` is split."""
    texts = {name: _names(split, column) for name, split in splits.items()}
    if "test" not in texts:
        test = test_mask(np.asarray(texts["train"]), spec.test_share, where)
        texts = {"train": texts["train"][~test], "test": texts["train"][test]}
    return {name: Counter(values.tolist()) for name, values in texts.items()}


def _names(split: datasets.Dataset, column: str) -> np.ndarray:
    """Return the name of each example's class; without classes all have the same name."""
    if not column:
        return np.zeros(len(split)).astype(str)
    feature, values = split.features[column], split[column][:]
    if isinstance(feature, datasets.ClassLabel):
        values = [
            feature.names[value] if value is not None and value >= 0 else None for value in values
        ]
    return np.asarray([str(value) for value in values], dtype=object).astype(str)
