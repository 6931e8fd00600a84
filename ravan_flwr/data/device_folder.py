"""Read a device's own folder of examples (`data-path` in its node config) where it lies."""

import glob
from pathlib import Path
from typing import Any

import datasets

from ravan_flwr.data.encoding import check_encoding
from ravan_flwr.data.examples import by_role
from ravan_flwr.data.hub import cache_of
from ravan_flwr.data.hub_errors import telling
from ravan_flwr.specs import DataSpec

_IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff")
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}
_KINDS = TABLES | dict.fromkeys(_IMAGES, "imagefolder")


def own_examples(path: str, spec: DataSpec) -> datasets.Dataset:
    """Read a device's folder: images in a folder a label, parquet, CSV, JSON lines."""
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
    check_encoding(examples, where)
    return by_role(examples, spec, where)


def _is_seen(file: Path, folder: Path) -> bool:
    """Tell whether `datasets` sees a file: not what is hidden, nor folders such as `__MACOSX`."""
    names = file.relative_to(folder).parts
    return not any(name.startswith((".", "__")) for name in names)
