"""Load labelled examples that a run has not seen: a folder, a file, or a data set of the hub."""

import glob
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets

from ravan_flwr.data.examples import by_role, with_roles_and_labels
from ravan_flwr.data.hub import as_files, cache_of, check_encoding, telling
from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.data.rows import IMAGES
from ravan_flwr.specs import DataSpec

TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_KINDS = TABLES | dict.fromkeys(IMAGES, "imagefolder")


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
    files = sorted(filter(Path.is_file, folder.rglob("*"))) or [folder]
    for file in files:
        # `datasets` sees neither what is hidden nor folders such as `__MACOSX`.
        seen = not any(name.startswith((".", "__")) for name in file.relative_to(folder).parts)
        if seen and (kind := _KINDS.get(file.suffix.lower())):
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
    source: dict[str, Any] = {"data_files": [glob.escape(name) for name in names]}
    if kind == "imagefolder":  # a label by its folder, be there one or many, whatever its name
        pattern = glob.escape(str(folder)) + "/**" * folder.is_dir()
        source = {"data_files": pattern, "drop_labels": False}
    with telling("data", path), _reading(where, f"as {kind} "):
        cache = str(cache_of(folder))
        examples = datasets.load_dataset(
            kind, split="train", cache_dir=cache, trust_remote_code=False, **source
        )
    if not len(examples):
        raise ValueError(f"{where}: got no example, expected some; fill it")
    check_encoding(examples, where)
    return by_role(as_files(examples), spec, where)


@contextmanager
def _reading(where: str, kind: str = "") -> Iterator[None]:
    """Turn what `datasets` raises of files that it cannot read into a ValueError."""
    try:
        yield
    except (datasets.exceptions.DatasetGenerationError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{where}: got no example, expected some; fill it") from None
        cause = error.__cause__ or error
        reason = " ".join(f"{type(cause).__name__}: {cause}".split())[:300]
        raise ValueError(
            f"{where}: it cannot be read {kind}({reason}), expected images in a folder for each "
            "label, parquet, CSV or JSON lines; correct the files"
        ) from None


def other_examples(spec: DataSpec) -> tuple[datasets.Dataset, str]:
    """Load the examples to evaluate on, columns by role, and return which splits they are.

    Of data with splits: those that the spec names as tests, or else `test`, or else all.
    """
    place, where = Path(spec.name), f"data {spec.name}"
    if is_idx(place):
        return with_roles_and_labels(idx_splits(place)["test"], spec, f"data {place}"), "test"
    source = _source(place, spec)
    with telling("data", spec.name, spec.revision), _reading(where):
        builder = datasets.load_dataset_builder(**source)
        if builder.name == "imagefolder":  # a label by its folder, be there one or many
            source["drop_labels"] = False
        there = [str(name) for name in builder.config.data_files or builder.info.splits or ()]
        tests = [split for _, split in spec.tests]
        whole = ["test"] if "test" in there else there
        chosen = tests if set(tests) <= set(there) else whole
        examples = datasets.load_dataset(split="+".join(chosen), **source)
    check_encoding(examples, where)
    splits = "all examples" if len(there) == 1 and chosen == ["train"] else " and ".join(chosen)
    return with_roles_and_labels(as_files(examples), spec, where), splits


def _source(place: Path, spec: DataSpec) -> dict[str, Any]:
    """Describe a file, a folder, or a data set of the hub to `datasets`."""
    if not place.exists():
        return {
            "path": spec.name, "name": spec.subset or None, "revision": spec.revision or None
        }  # fmt: skip
    kind = place.suffix.lower()
    if not place.is_dir() and kind not in TABLES:
        raise ValueError(
            f"data {place}: got a file of kind {place.suffix!r}, expected {', '.join(TABLES)}, or "
            "a folder; name another"
        )
    cache = {"cache_dir": str(cache_of(place))}
    if not place.is_dir():
        return {"path": TABLES[kind], "data_files": str(place), **cache}
    # A copy of the hub's repository has its subsets in README.md; any other folder, as folders.
    if (place / "README.md").is_file():
        return {"path": str(place), "name": spec.subset or None, **cache}
    inner = place / spec.subset
    return {"path": str(inner if inner.is_dir() else place), **cache}
