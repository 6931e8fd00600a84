"""Get data sets of the Hugging Face Hub: from its cache, from a folder, or downloaded."""

import hashlib
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.features.features import _visit

from ravan_flwr.data.hub_errors import telling
from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.data.packed import check_examples
from ravan_flwr.data.rows import IMAGES
from ravan_flwr.files import check_file
from ravan_flwr.specs import DataSpec


def check_encoding(examples: datasets.Dataset, where: str) -> None:
    """Raise ValueError, with the column, if a text is no UTF-8; no value is copied."""
    table = examples.data.table
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid:
            raise ValueError(
                f"{where}: column {name!r} has texts that are no UTF-8, expected all in UTF-8; "
                "write the files anew: iconv -f LATIN1 -t UTF-8 OLD > NEW, say, if they are in "
                "Latin-1"
            ) from None


log = logging.getLogger(__name__)


def load_data(spec: DataSpec) -> datasets.DatasetDict:
    """Load `train` and the server's test splits, by the names that the preset gives them."""
    from flwr_datasets import FederatedDataset  # noqa: PLC0415 (with matplotlib and seaborn)

    folder = Path(spec.name)
    if is_idx(folder):
        return idx_splits(folder)
    # A copy of the hub's repository has its subsets in README.md; any other folder, as folders.
    plain = folder.is_dir() and not (folder / "README.md").is_file()
    if plain and spec.subset and not (folder / spec.subset).is_dir():
        raise ValueError(
            f"data {spec.name}: it has no folder {spec.subset}, expected the preset's task in it, "
            f"as {spec.subset}/train.parquet, say; for a task of your own write a preset, "
            f"`ravan-flwr new NAME --data {spec.name} --model MODEL`"
        )
    federated = FederatedDataset(
        dataset=str(folder / spec.subset) if plain else spec.name,
        subset=None if plain else spec.subset or None,
        shuffle=False,
        trust_remote_code=False,
        partitioners={},  # the clients' parts are rows of the whole (partition.py)
        **({"revision": spec.revision} if spec.revision else {}),
        **({"cache_dir": str(cache_of(folder))} if folder.is_dir() else {}),
    )
    splits = {"train": spec.train, **dict(spec.tests)}
    with telling("data", spec.name, spec.revision):
        found = {}
        for name, split in splits.items():
            try:
                found[name] = as_files(federated.load_split(split))
            except ValueError as error:
                if split != "test" or "split" not in str(error):
                    raise  # without a split `test`, some of `train` is held back
        return datasets.DatasetDict(found)


def every_split(name: str, subset: str, revision: str) -> datasets.DatasetDict:
    """Load all splits of a data set that nothing is known of yet."""
    folder = Path(name)
    with telling("data", name, revision):
        splits = datasets.load_dataset(
            name,
            subset or None,
            trust_remote_code=False,
            **({"revision": revision} if revision else {}),
            **({"cache_dir": str(cache_of(folder))} if folder.is_dir() else {}),
        )
        return datasets.DatasetDict({split: as_files(found) for split, found in splits.items()})


def cache_of(path: Path) -> Path:
    """Choose where `datasets` keeps what it made of a folder of the user's as it is now.

    Its own cache takes two folders with the same names in them for one, whatever their content.
    Raise ValueError for files that it has not read yet, and that it had better not.
    """
    digest = hashlib.sha256(str(path.resolve()).encode())
    files = [path]
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if not file.is_dir())
        for file in files:
            if not file.is_file():
                check_file(file)  # `datasets` would see no file there
    for file in files:
        stat = file.stat()
        digest.update(f"{file.relative_to(path)} {stat.st_size} {stat.st_mtime_ns}".encode())
    cache = Path(datasets.config.HF_DATASETS_CACHE) / f"folder-{digest.hexdigest()[:16]}"
    if not cache.exists():
        for file in files:
            if file.suffix.lower() not in IMAGES:
                check_examples(file)
    return cache


def as_files(examples: datasets.Dataset) -> datasets.Dataset:
    """Leave images as the files that they are: `datasets` opens them whatever is in them."""
    for name, feature in examples.features.items():
        closed = _visit(feature, _closed)
        if closed != feature:
            examples = examples.cast_column(name, closed)
    return examples


def _closed(feature: Any) -> Any:
    """Describe files of any kind as such; None for anything else."""
    return replace(feature, decode=False) if getattr(feature, "decode", False) else None
