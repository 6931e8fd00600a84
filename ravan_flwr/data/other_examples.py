"""Load labelled examples that a run has not seen: a folder, a file, or a data set of the hub."""

from pathlib import Path
from typing import Any

import datasets

from ravan_flwr.data.device_folder import TABLES
from ravan_flwr.data.encoding import check_encoding
from ravan_flwr.data.examples import with_roles_and_labels
from ravan_flwr.data.hub import cache_of
from ravan_flwr.data.hub_errors import telling
from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.specs import DataSpec


def other_examples(spec: DataSpec) -> tuple[datasets.Dataset, str]:
    """Load the examples to evaluate on, columns by role, and say which splits they are.

    Of data with splits: those that the spec names as tests, or else `test`, or else all.
    """
    place = Path(spec.name)
    if is_idx(place):
        return with_roles_and_labels(idx_splits(place)["test"], spec, f"data {place}"), "test"
    is_file = place.exists() and not place.is_dir()
    source = _file(place) if is_file else _repository(place, spec)
    where = f"data {spec.name}"
    with telling("data", spec.name, spec.revision):
        try:
            builder = datasets.load_dataset_builder(**source)
            if builder.name == "imagefolder":  # a label by its folder, be there one or many
                source["drop_labels"] = False
            there = [str(name) for name in builder.config.data_files or builder.info.splits or ()]
            chosen = _chosen(there, spec)
            examples = datasets.load_dataset(split="+".join(chosen), **source)
        except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
            if "corresponds to no data" in str(error):
                raise ValueError(f"{where}: got no example, expected some; fill it") from None
            cause = error.__cause__ or error
            told = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
            raise ValueError(
                f"{where}: it cannot be read ({told}), expected images in a folder for each label, "
                "parquet, CSV or JSON lines; correct the files"
            ) from None
    check_encoding(examples, where)
    told = "all examples" if len(there) == 1 and chosen == ["train"] else " and ".join(chosen)
    return with_roles_and_labels(examples, spec, where), told


def _chosen(there: list[str], spec: DataSpec) -> list[str]:
    """Choose the splits."""
    tests = [split for _, split in spec.tests]
    if set(tests) <= set(there):
        return tests
    return ["test"] if "test" in there else there


def _file(path: Path) -> dict[str, Any]:
    """Tell `datasets` of one file."""
    if path.suffix.lower() not in TABLES:
        raise ValueError(
            f"data {path}: got a file of kind {path.suffix!r}, expected {', '.join(TABLES)}, or a "
            "folder; name another"
        )
    kind = TABLES[path.suffix.lower()]
    return {"path": kind, "data_files": str(path), "cache_dir": str(cache_of(path))}


def _repository(place: Path, spec: DataSpec) -> dict[str, Any]:
    """Tell `datasets` of a folder, or of a data set of the hub."""
    if not place.is_dir():
        return {
            "path": spec.name,
            "name": spec.subset or None,
            "revision": spec.revision or None,
        }
    # A copy of the hub's repository has its subsets in README.md; any other folder, as folders.
    if (place / "README.md").is_file():
        return {
            "path": str(place),
            "name": spec.subset or None,
            "cache_dir": str(cache_of(place)),
        }
    inner = place / spec.subset
    folder = inner if inner.is_dir() else place
    return {"path": str(folder), "cache_dir": str(cache_of(place))}
