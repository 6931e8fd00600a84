"""Get data sets of the Hugging Face Hub: from its cache, from a folder, or downloaded."""

import hashlib
import logging
from pathlib import Path
from typing import Any

import datasets

from ravan_flwr.data.hub_errors import telling
from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.specs import DataSpec

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
        return datasets.DatasetDict(
            {
                name: federated.load_split(split)
                for name, split in splits.items()
                if split != "test" or _has_test(federated)
            }
        )


def every_split(name: str, subset: str, revision: str) -> datasets.DatasetDict:
    """Load all splits of a data set that nothing is known of yet."""
    folder = Path(name)
    with telling("data", name, revision):
        return datasets.load_dataset(
            name,
            subset or None,
            trust_remote_code=False,
            **({"revision": revision} if revision else {}),
            **({"cache_dir": str(cache_of(folder))} if folder.is_dir() else {}),
        )


def _has_test(federated: Any) -> bool:
    """Tell whether there is a split `test`; where there is none, some of `train` is held back."""
    try:
        federated.load_split("test")
    except ValueError as error:
        if "split" in str(error):
            return False
        raise
    return True


def cache_of(path: Path) -> Path:
    """Choose where `datasets` keeps what it made of a folder of the user's as it is now.

    Its own cache takes two folders with the same names in them for one, whatever their content.
    """
    digest = hashlib.sha256(str(path.resolve()).encode())
    for file in sorted(path.rglob("*")) if path.is_dir() else [path]:
        if file.is_file():  # and no link that leads nowhere
            stat = file.stat()
            digest.update(f"{file.relative_to(path)} {stat.st_size} {stat.st_mtime_ns}".encode())
    return Path(datasets.config.HF_DATASETS_CACHE) / f"folder-{digest.hexdigest()[:16]}"
