"""The examples: a source split into train and test, a client's part of the first, or its own.

Simulated clients share a data set, dealt out by the partitioners of flwr-datasets or by dealing.py.
A device has a folder of its own (`data-path` in its node config), which is read where it lies.
"""

import glob
import logging
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import datasets
import numpy as np

from ravan_flwr.data.dealing import deal_by_client
from ravan_flwr.data.hub import cache_of, load_data, telling
from ravan_flwr.seeding import derive
from ravan_flwr.specs import DataSpec

if TYPE_CHECKING:
    from flwr_datasets.partitioner import Partitioner

log = logging.getLogger(__name__)


def load_splits(spec: DataSpec) -> datasets.DatasetDict:
    """`train` and the server's test splits, the same on every machine, columns by their role."""
    splits, data = SOURCES[spec.source](spec), f"data {spec.name or spec.source}"
    differing: dict[int, str] = {}
    for name, split in splits.items():
        where = f"{data}, {name}"
        splits[name], different = _by_number(_by_role(split, spec, where), spec.labels, where)
        differing |= different
    _tell_of_names(differing, spec.labels, data)
    return splits


def _sklearn_digits(_: DataSpec) -> datasets.DatasetDict:
    """The 1,797 handwritten 8 x 8 digits of scikit-learn, 80 % to train and 20 % to test."""
    from sklearn.datasets import load_digits  # noqa: PLC0415 (only this source needs it)

    images, labels = load_digits(return_X_y=True)
    images = (images.reshape(-1, 8, 8) / 16).astype(np.float32)
    features = datasets.Features(
        {
            "image": datasets.Array2D((8, 8), "float32"),
            "label": datasets.ClassLabel(names=[str(digit) for digit in range(10)]),
        }
    )
    test = _fifth_of_each_class(labels)
    return datasets.DatasetDict(
        {
            name: datasets.Dataset.from_dict(
                {"image": images[rows], "label": labels[rows]}, features=features
            )
            for name, rows in (("train", ~test), ("test", test))
        }
    )


def _fifth_of_each_class(labels: np.ndarray) -> np.ndarray:
    """A mask over the examples, the same always; `datasets` would go through them row by row."""
    random = np.random.default_rng(0)
    chosen = np.zeros(len(labels), dtype=bool)
    for label in np.unique(labels):
        rows = random.permutation(np.flatnonzero(labels == label))
        chosen[rows[: round(len(rows) / 5)]] = True
    return chosen


SOURCES = {"sklearn-digits": _sklearn_digits, "hub": load_data}


def _by_role(examples: datasets.Dataset, spec: DataSpec, where: str) -> datasets.Dataset:
    """The same with its columns called as what they are for; others are left out.

    A column may be called as in the preset, or by its role already.
    """
    found = {}
    for role, column in spec.columns:
        there = next((name for name in (column, role) if name in examples.column_names), None)
        if there is None:
            raise ValueError(
                f"{where}: got the columns {examples.column_names}, expected {column!r} or "
                f"{role!r} among them; rename one"
            )
        found[there] = role
    kept, other = [*found], spec.partition_by
    if other not in dict(spec.columns) and other in examples.column_names:
        kept = list(dict.fromkeys([*kept, other]))
    return examples.select_columns(kept).rename_columns(
        {column: role for column, role in found.items() if column != role}
    )


# A data set of the hub may spell a class otherwise than the preset: its number tells, then. Not so
# for classes that `datasets` makes of the names of folders, and numbers as they are sorted.
_BY_FOLDER = "imagefolder"


def _by_number(
    examples: datasets.Dataset, labels: Sequence[str], where: str
) -> tuple[datasets.Dataset, Mapping[int, str]]:
    """The same with its numbered classes called as in the preset, and the names that differed.

    Where the preset knows all names there is nothing to do: names are looked up. A name that
    both know must have one number.
    """
    feature = examples.features.get("label") if labels else None
    if not isinstance(feature, datasets.ClassLabel) or set(feature.names) <= set(labels):
        return examples, {}
    if examples.info.builder_name == _BY_FOLDER:
        return examples, {}  # as a device's own folders: what is unknown is an error later on
    names = dict(enumerate(feature.names))
    if len(names) != len(labels):
        raise ValueError(
            f"{where}: got {len(names)} classes, {_some(feature.names)}; expected the preset's "
            f"{len(labels)}, {_some(labels)}; take other data, or a preset with these labels"
        )
    different = {number: name for number, name in names.items() if name != labels[number]}
    if moved := [name for name in different.values() if name in labels]:
        raise ValueError(
            f"{where}: got the classes {_some(feature.names)}: some are unknown, and "
            f"{_some(moved)} have other numbers than in the preset; expected {_some(labels)}, in "
            "this order; take other data, or a preset with these labels"
        )
    called = datasets.ClassLabel(names=list(labels))
    return examples.cast_column("label", called), different


def _tell_of_names(differing: Mapping[int, str], labels: Sequence[str], data: str) -> None:
    pairs = [f"{number} {name!r}, {labels[number]!r} here" for number, name in differing.items()]
    if pairs:
        log.warning(
            "%s: classes are told by their numbers, since some have other names than in the "
            "preset: %s", data, "; ".join(pairs[:20]) + ("; ..." if len(pairs) > 20 else ""),
        )  # fmt: skip


def _some(names: Sequence[str], most: int = 20) -> str:
    """The first of them."""
    return ", ".join(map(str, names[:most])) + (", ..." if len(names) > most else "")


def label_numbers(examples: datasets.Dataset, labels: Sequence[str], where: str) -> np.ndarray:
    """The numbers of the examples' labels: names are looked up, numbers must be in range.

    Of a numbered class the name counts: `load_splits` has settled whose names those are.
    """
    feature, column = examples.features["label"], examples["label"][:]
    if isinstance(feature, datasets.ClassLabel):
        column = [feature.names[number] if number >= 0 else None for number in column]
    if column and isinstance(column[0], int):
        numbers = np.asarray(column)
        wrong = sorted(set(numbers[(numbers < 0) | (numbers >= len(labels))].tolist()))
        expected = f"numbers from 0 to {len(labels) - 1}"
    else:
        known = {name: number for number, name in enumerate(labels)}
        wrong = sorted({str(name) for name in column if name not in known})
        numbers = np.asarray([known.get(name, -1) for name in column])
        expected = ", ".join(labels)
    if wrong:
        raise ValueError(
            f"{where}: got unknown labels {_some(wrong)}; expected {expected}; rename them, or "
            "take the examples out"
        )
    return numbers


# A device's own examples.

_KINDS = {
    ".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json",
    ".png": "imagefolder", ".jpg": "imagefolder", ".jpeg": "imagefolder", ".bmp": "imagefolder",
    ".webp": "imagefolder", ".tif": "imagefolder", ".tiff": "imagefolder",
}  # fmt: skip


def own_examples(path: str, spec: DataSpec) -> datasets.Dataset:
    """The examples in a device's folder: images in a folder a label, parquet, CSV, JSON lines."""
    folder = Path(path).expanduser()
    where = f"node config: data-path = {path!r}"
    if not folder.is_absolute() or not folder.exists():
        raise ValueError(
            f"{where}: found no such folder, expected the absolute path of one on this device; "
            "correct it"
        )
    files = sorted(file for file in folder.rglob("*") if file.is_file() and _is_seen(file, folder))
    files = files or [folder]
    by_kind: dict[str, list[str]] = {}
    for file in files:
        if kind := _KINDS.get(file.suffix.lower()):
            by_kind.setdefault(kind, []).append(str(file))
    if "imagefolder" in by_kind:  # a metadata.csv or .jsonl may stand beside the images
        by_kind = {"imagefolder": by_kind["imagefolder"]}
    if len(by_kind) != 1:
        got = " and ".join(sorted(by_kind)) or f"{len(files)} files of other kinds"
        raise ValueError(
            f"{where}: got {got}, expected images, parquet, CSV or JSON lines, and one kind of "
            "them; take the others out"
        )
    ((kind, names),) = by_kind.items()
    how: dict[str, Any] = {"data_files": [glob.escape(name) for name in names]}
    if kind == "imagefolder":  # a label by its folder, be there one or many, whatever its name
        pattern = glob.escape(str(folder)) + "/**" * folder.is_dir()
        how = {"data_files": pattern, "drop_labels": False}
    with telling("data", path):
        try:
            cache = str(cache_of(folder))
            examples = datasets.load_dataset(
                kind, split="train", cache_dir=cache, trust_remote_code=False, **how
            )
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            if "corresponds to no data" in str(error):
                raise ValueError(f"{where}: got no example, expected some; fill it") from None
            cause = error.__cause__ or error
            raise ValueError(
                f"{where}: it cannot be read as {kind}: {type(cause).__name__}: {cause}; correct "
                "the files"
            ) from None
    if not len(examples):
        raise ValueError(f"{where}: got no example, expected some; fill it")
    return _by_role(examples, spec, where)


def _is_seen(file: Path, folder: Path) -> bool:
    """`datasets` passes over what is hidden, and folders such as `__MACOSX`."""
    names = file.relative_to(folder).parts
    return not any(name.startswith((".", "__")) for name in names)


# Shares of a data set. flwr-datasets imports matplotlib and seaborn, a second of every message to
# a device, which has a process of its own for each; one with its own examples never comes here.


@dataclass(frozen=True)
class Partition:
    """How simulated clients share the training examples."""

    kind: str  # one of PARTITIONERS
    alpha: float
    number: int
    seed: int


def deal_out(train: datasets.Dataset, partition: Partition, column: str) -> list[np.ndarray]:
    """The rows of `train` that each client has.

    Under a Dirichlet partition, clients differ in how often they have each value of the column.
    """
    if partition.number > len(train):
        raise ValueError(
            f"{partition.number} clients share {len(train)} examples, expected at least one "
            "each; use fewer clients"
        )
    if column not in train.column_names:
        raise ValueError(
            f"partition-by = {column!r}: the examples have {train.column_names}, expected one of "
            "them; correct the preset"
        )
    rows = datasets.Dataset.from_dict({"row": np.arange(len(train)), column: train[column][:]})
    seed = derive(partition.seed, "partition") % 2**32
    return PARTITIONERS[partition.kind](rows, partition, column, seed)


def _iid(rows: datasets.Dataset, partition: Partition, _: str, seed: int) -> list[np.ndarray]:
    """Deal out equal shares of a shuffled whole, by flwr-datasets."""
    from flwr_datasets.partitioner import IidPartitioner  # noqa: PLC0415

    partitioner = IidPartitioner(num_partitions=partition.number)
    partitioner.dataset = rows.shuffle(seed=seed)
    return _dealt(partitioner, partition.number)


def _dirichlet(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    """Split every class over the clients by a draw from a Dirichlet distribution, by flwr-datasets.

    Clients differ in what they have, and widely in how much. Draws that leave a client with next to
    nothing are repeated, by flwr-datasets ten times a seed, then with further seeds.
    """
    from flwr_datasets.partitioner import DirichletPartitioner  # noqa: PLC0415

    smallest = max(1, min(10, len(rows) // (4 * partition.number)))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The specified min_partition_size")
        for attempt in range(20):
            partitioner = DirichletPartitioner(
                num_partitions=partition.number,
                partition_by=column,
                alpha=partition.alpha,
                min_partition_size=smallest,
                seed=seed + attempt,
            )
            partitioner.dataset = rows
            try:
                partitioner.load_partition(0)  # this draws, for all clients
            except ValueError as error:
                if "number of attempts" not in str(error):
                    raise
                continue
            return _dealt(partitioner, partition.number)
    raise ValueError(
        f"partition-alpha = {partition.alpha}: {partition.number} clients got fewer than "
        f"{smallest} of {len(rows)} examples in every of 220 draws; raise partition-alpha, use "
        "fewer clients, or partition=dirichlet-by-client"
    )


def _dealt(partitioner: "Partitioner", number: int) -> list[np.ndarray]:
    """The rows of every client."""
    return [
        np.asarray(partitioner.load_partition(client).with_format("numpy")["row"][:])
        for client in range(number)
    ]


def _dirichlet_by_client(
    rows: datasets.Dataset, partition: Partition, column: str, seed: int
) -> list[np.ndarray]:
    """Draw every client's proportions from a Dirichlet distribution, and give equal shares."""
    labels = np.asarray(rows[column][:])
    return deal_by_client(labels, partition.number, partition.alpha, np.random.default_rng(seed))


PARTITIONERS = {
    "iid": _iid, "dirichlet": _dirichlet, "dirichlet-by-client": _dirichlet_by_client,
}  # fmt: skip
