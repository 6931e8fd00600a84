"""Load data sets of the Hugging Face Hub: from its cache, from a folder, or by download.

`hub_errors` turns errors of the hub into ValueErrors that state what to do.
"""

import glob
import hashlib
import logging
import re
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import httpx
import pandas as pd
import pyarrow as pa
import transformers
from datasets.data_files import FILES_TO_IGNORE
from datasets.exceptions import DatasetNotFoundError, DatasetsError
from datasets.features.features import _visit
from datasets.packaged_modules import _PACKAGED_DATASETS_MODULES
from huggingface_hub.errors import (
    EntryNotFoundError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging

from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.data.packed import check_examples
from ravan_flwr.data.rows import IMAGES
from ravan_flwr.files import check_file
from ravan_flwr.specs import DataSpec

TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


class NotAvailableError(ValueError):
    """A model or data set that is neither in the cache nor downloadable, with advice."""


# Gated and private ones, too: `datasets` has one error for all of them.
_REFUSED = (RepositoryNotFoundError, RevisionNotFoundError, DatasetNotFoundError)
_UNAVAILABLE = (
    LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, ConnectionError, httpx.HTTPError,
    DatasetsError, FileNotFoundError, ValueError,
)  # fmt: skip


@contextmanager
def hub_errors(source: str, name: str, revision: str = "", where: str = "") -> Iterator[None]:
    """Turn errors of the hub into a ValueError that states what to do; hide progress bars.

    `source` is "model" or "data"; `where` replaces it and the name at the start of the message.
    """
    where = where or f"{source} {name}" + (f" at revision {revision}" if revision else "")
    note = "" if "/" in name else "found nothing there; correct the path; as an id of the hub: "
    try:
        with no_bars():
            yield
    except _REFUSED as error:
        raise ValueError(
            f"{where}: {note}the hub refuses it ({_short(error)}), expected one that is there; "
            "correct the id or the revision, or accept its terms on its page, and log in with `hf "
            "auth login` or set HF_TOKEN"
        ) from None
    except StopIteration:  # `datasets` raises it for JSON lines without a line
        raise ValueError(
            f"{where}: a file of it is empty, expected examples in each; fill it, or take it out"
        ) from None
    except _UNAVAILABLE as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{where}: got no example, expected some; fill it") from None
        if Path(name).exists():
            raise ValueError(
                f"{where}: its files cannot be read ({_short(error.__cause__ or error)}), expected "
                "CSV, JSON lines, parquet or images, with the same columns and types in each; "
                "correct the files"
            ) from None
        if name.startswith(("/", ".", "~")):
            raise NotAvailableError(
                f"{where}: found no such folder, expected one that is here; has it moved? Name its "
                f"place, {source}=/path, or in the preset"
            ) from None
        if type(error) is ValueError:  # `datasets` lists what exists, such as subsets
            raise
        options = "" if source == "model" else " --repo-type dataset --local-dir /path"
        at = f" --revision {revision}" if revision else ""
        raise NotAvailableError(
            f"{where}: {note}it is not in the cache, and cannot be downloaded ({_short(error)}); "
            f"run `hf download {name}{options}{at}` where there is a connection, name a folder "
            "that is here, such as /path, or correct the id or the revision"
        ) from None


def _short(error: BaseException) -> str:
    """Return an error's type and first line, shortened."""
    line = next(iter(str(error).strip().splitlines()), "no reason given")
    return textwrap.shorten(f"{type(error).__name__}: {line.rstrip('.')}", 300, placeholder=" ...")


@contextmanager
def no_bars() -> Iterator[None]:
    """Hide the libraries' progress bars and load reports."""
    logging_of = transformers.utils.logging
    shown, level = logging_of.is_progress_bar_enabled(), logging_of.get_verbosity()
    datasets_bars, hub_level = datasets.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging_of.disable_progress_bar()
    logging_of.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)  # otherwise it logs each of its attempts
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging_of.set_verbosity(level)
        hub_logging.set_verbosity(hub_level)
        if shown:
            logging_of.enable_progress_bar()
        if datasets_bars:
            datasets.enable_progress_bars()


def check_encoding(examples: datasets.Dataset, where: str) -> None:
    """Raise ValueError that names the column if a text is not UTF-8; copy no value."""
    table = examples.data.table
    for name in table.column_names:
        try:
            table.column(name).validate(full=True)
        except pa.ArrowInvalid:
            raise ValueError(
                f"{where}: column {name!r} has texts that are no UTF-8, expected UTF-8 throughout; "
                "save it as UTF-8"
            ) from None


def load_data(spec: DataSpec) -> datasets.DatasetDict:
    """Load `train` and the server's test splits, named as in the preset."""
    splits = every_split(spec.name, spec.subset, spec.revision)
    split_names = {"train": spec.train, **dict(spec.tests)}
    # A missing split `test` is split off `train` later.
    optional = {"test"} if [split for _, split in spec.tests] == ["test"] != [spec.train] else ()
    if missing := [x for x in split_names.values() if x not in {*splits, *optional}]:
        raise ValueError(
            f"data {spec.name}: got the splits {', '.join(splits)}, expected {', '.join(missing)}; "
            "correct data.splits in the preset"
        )
    by_name = {name: splits[split] for name, split in split_names.items() if split in splits}
    for name, split in by_name.items():
        check_encoding(split, f"data {spec.name}, {name}")
    return datasets.DatasetDict(by_name)


def every_split(
    name: str, subset: str, revision: str, *, foreign: bool = False
) -> datasets.DatasetDict:
    """Load all splits of a data set of the hub, a folder or a file.

    `foreign` marks data other than a preset's own. A folder then need not have the subset, and
    images have their folder's name as label, even if there is only one folder.
    """
    if is_idx(Path(name)):
        return idx_splits(Path(name))
    source = _source(name, subset, revision, foreign)
    with hub_errors("data", name, revision):
        if foreign and datasets.load_dataset_builder(**source).name == "imagefolder":
            source["drop_labels"] = False
        splits = datasets.load_dataset(**source)
    return datasets.DatasetDict({split: as_files(examples) for split, examples in splits.items()})


def _source(name: str, subset: str, revision: str, foreign: bool) -> dict[str, Any]:
    """Return the arguments of `datasets.load_dataset` for a hub id, a folder or a file.

    A copy of a hub repository lists its subsets in README.md; any other folder has them as folders.
    """
    root = Path(name)
    if not root.exists():
        if root.is_absolute():
            raise ValueError(
                f"data {name}: found no such folder, expected the data there; has it moved? Name "
                "its place: data=/path, or data.name in the preset"
            )
        if name in _PACKAGED_DATASETS_MODULES:  # `datasets` would read all files below this folder
            raise ValueError(
                f"data {name}: got the name of a kind of file, and no such file or folder is here, "
                "expected a file, a folder or an id of the hub; correct the name"
            )
        return {"path": name, "name": subset or None, "revision": revision or None}
    if root.is_file():
        if (loader := TABLES.get(root.suffix.lower())) is None:
            raise ValueError(
                f"data {root}: got a file of kind {root.suffix!r}, expected "
                f"{', '.join(TABLES)}, or a folder; name another"
            )
        cache = str(cache_folder(root, [root]))
        options = csv_options([root]) if loader == "csv" else {}
        return {"path": loader, "data_files": glob.escape(str(root)), "cache_dir": cache} | options
    if subset and not (root / "README.md").is_file():
        if (root / subset).is_dir():
            root /= subset
        elif not foreign:
            raise ValueError(
                f"data {root}: it has no folder {subset}, expected the preset's task in it, as "
                f"{subset}/train.parquet, say; for a task of your own write a preset, "
                f"`ravan-flwr new NAME --data {root} --model MODEL`"
            )
        subset = ""
    files = visible_files(root)
    check_one_format(root, files)
    cache = str(cache_folder(root, files))
    # Images may have a metadata table; other files, such as a license, are not read.
    read = {path.suffix.lower() for path in files} & {*TABLES, *IMAGES}
    # Of a copy of a hub repository it is not known which files are those of the subset.
    tables = [path for path in files if path.suffix.lower() == ".csv" and not subset]
    options = csv_options(tables) if read == {".csv"} else {}
    return {"path": str(root), "name": subset or None, "cache_dir": cache} | options


def csv_options(files: Sequence[Path]) -> dict[str, Any]:
    """Return the options by which `datasets` reads these files of CSV.

    Only an empty field counts as missing: a class may be called None, and a text NA. A column is
    read as texts unless it has numbers alone, or booleans, in all files. pandas would decide that
    for every 10,000 rows anew, and take 007 for the number 7.
    """
    texts = sorted(set[str]().union(*map(_text_columns, files)))
    return {
        "keep_default_na": False, "na_values": [""], "converters": dict.fromkeys(texts, _text)
    }  # fmt: skip


def _text(field: str) -> str | None:
    return field or None


_ROWS = 100_000  # rows of CSV that are looked at together
# Numbers without zeros in front, and booleans; an empty field may be either.
_PLAIN = (
    re.compile(r"([ \t]*[-+]?((0|[1-9][0-9]*)(\.[0-9]*)?|\.[0-9]+)([eE][-+]?[0-9]+)?[ \t]*)?"),
    re.compile("(true|True|TRUE|false|False|FALSE)?"),
)


def _text_columns(path: Path) -> set[str]:
    """Return the columns of CSV, plain or gzipped, that are not numbers or booleans throughout."""
    with path.open("rb") as file:
        packing = "gzip" if file.read(2) == b"\x1f\x8b" else None
    read = partial(pd.read_csv, path, compression=packing, dtype=str, na_filter=False)
    fitting: dict[str, list[re.Pattern[str]]] = {}  # which of the patterns fit all fields so far
    with suppress(ValueError):  # reported when `datasets` reads the file
        fitting = {name: [*_PLAIN] for name in read(nrows=0)}
        # Long texts rarely fit in the first row, so that no more of them are read.
        for rows in (1, None):
            if plain := [name for name, patterns in fitting.items() if patterns]:
                with read(usecols=plain, nrows=rows, chunksize=_ROWS) as chunks:
                    for name, column in (pair for chunk in chunks for pair in chunk.items()):
                        fields = column.unique()
                        fitting[name] = [x for x in fitting[name] if all(map(x.fullmatch, fields))]
    return {name for name, patterns in fitting.items() if not patterns}


def check_one_format(folder: Path, files: Sequence[Path]) -> None:
    """Raise ValueError for tables in several formats, since `datasets` would read only one."""
    if (folder / "README.md").is_file():  # a copy of a hub repository, which may name its files
        return
    # A metadata table may accompany images.
    suffixes = {path.suffix.lower() for path in files if path.stem != "metadata"} & TABLES.keys()
    if len(suffixes) > 1 and suffixes != {".json", ".jsonl"}:  # both are read
        raise ValueError(
            f"data {folder}: got files of the kinds {', '.join(sorted(suffixes))}, expected one "
            "kind, since only one would be read; take the others out"
        )


def visible_files(root: Path) -> list[Path]:
    """List the files of a folder that `datasets` may read: none hidden, or in `__MACOSX` and such.

    A path that is no folder is the only file.
    """
    if not root.is_dir():
        return [root]
    return [
        path
        for path in sorted(root.rglob("*"))
        if not path.is_dir()
        and path.name not in FILES_TO_IGNORE
        and not any(name.startswith((".", "__")) for name in path.relative_to(root).parts)
    ]


def cache_folder(path: Path, files: Sequence[Path]) -> Path:
    """Return the cache folder of a user's data, chosen by the names, sizes and times of its files.

    The default cache of `datasets` confuses folders whose files have the same names. Raise
    ValueError for unsafe files, if this cache does not exist yet.
    """
    digest = hashlib.sha256(str(path.resolve()).encode())
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is a link to nothing, expected a file; remove it")
        if not file.is_file():
            check_file(file)  # `datasets` would ignore it
        stat = file.stat()
        digest.update(f"{file.relative_to(path)} {stat.st_size} {stat.st_mtime_ns}".encode())
    cache = Path(datasets.config.HF_DATASETS_CACHE) / f"folder-{digest.hexdigest()[:16]}"
    if not cache.exists():
        for file in files:
            if file.suffix.lower() not in IMAGES:
                check_examples(file)
    return cache


def as_files(examples: datasets.Dataset) -> datasets.Dataset:
    """Leave images undecoded: `datasets` would open any file, whatever it contains."""

    def undecode(feature: Any) -> Any:  # None: it stays as it is
        return replace(feature, decode=False) if getattr(feature, "decode", False) else None

    for name, feature in examples.features.items():
        undecoded = _visit(feature, undecode)
        if undecoded != feature:
            examples = examples.cast_column(name, undecoded)
    return examples
