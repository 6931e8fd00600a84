"""Get data sets of the Hugging Face Hub: from its cache, from a folder, or downloaded.

`telling` turns trouble with the hub into errors that say what to do.
"""

import hashlib
import logging
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa
import transformers
from datasets.data_files import FILES_TO_IGNORE
from datasets.exceptions import DatasetsError
from datasets.features.features import _visit
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
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

# Of CSV nothing but an empty field is missing: a class may be called None, and a text NA.
CSV = {"keep_default_na": False, "na_values": [""]}
TABLES = {".parquet": "parquet", ".csv": "csv", ".json": "json", ".jsonl": "json"}


class NotHereError(ValueError):
    """Say that something of the hub is not here, and what can be done about it."""

    def __init__(self, problem: str, advice: str) -> None:
        self.problem = problem
        super().__init__(f"{problem}; {advice}")


_UNREACHED = (
    LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, ConnectionError, httpx.HTTPError,
)  # fmt: skip


# The first that fits: one that is gated is a kind of one that is not found.
_ANSWERS: dict[type[Exception], str] = {
    GatedRepoError: "the hub gives it only to those who accepted its terms; accept them on its "
    "page, then log in with `hf auth login` or set HF_TOKEN",
    RevisionNotFoundError: "the hub has no such revision any more; name another one, "
    "{what}={name}@REVISION",
    RepositoryNotFoundError: "the hub has no such {what}, or it is private; correct the id, or log "
    "in with `hf auth login`",
}


@contextmanager
def telling(what: str, name: str, revision: str = "", at: str = "") -> Iterator[None]:
    """Turn errors of the hub into a ValueError that says what to do; hide progress bars."""
    at = at or f"{what} {name}" + (f" at revision {revision}" if revision else "")
    try:
        with no_bars():
            yield
    except tuple(_ANSWERS) as error:  # the hub answers, but gives nothing
        problem = next(text for kind, text in _ANSWERS.items() if isinstance(error, kind))
        raise ValueError(
            f"{at}: {problem.format(what=what, name=name)} ({_short(error)})"
        ) from None
    except _UNREACHED as error:
        raise NotHereError(
            f"{at}: it is not in the cache, and the hub cannot be reached ({_short(error)})",
            _advice(what, name, revision),
        ) from None
    except StopIteration:  # of `datasets`, over JSON lines without a line
        raise ValueError(
            f"{at}: a file of it is empty, expected examples in each; fill it, or take it out"
        ) from None
    except (DatasetsError, FileNotFoundError, ValueError) as error:
        if "corresponds to no data" in str(error):
            raise ValueError(f"{at}: got no example, expected some; fill it") from None
        cause = error.__cause__ or error
        if Path(name).exists():
            raise ValueError(
                f"{at}: its files cannot be read ({_short(cause)}), expected CSV, JSON lines, "
                "parquet or images, with the same columns and types in each; correct the files"
            ) from None
        if type(error) is ValueError:  # of `datasets`: it says what there is
            raise
        raise NotHereError(
            f"{at}: {_short(error)}",
            f"{_advice(what, name, revision)}; or correct the id or the revision, or accept its "
            "terms, if it has any, and log in with `hf auth login`",
        ) from None


def _advice(what: str, name: str, revision: str) -> str:
    """Write the command that downloads a model into the cache, or data into a folder."""
    kind = "" if what == "model" else " --repo-type dataset --local-dir /path"
    at = f" --revision {revision}" if revision else ""
    return (
        f"run `hf download {name}{kind}{at}` where there is a connection, or name a folder that is "
        "here, such as /path"
    )


def _short(error: BaseException, most: int = 300) -> str:
    """Return an error's first line, as far as its whole sentences fit."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
    if len(text) <= most:
        return text.rstrip(".")
    end = max(text.rfind(". ", 0, most), text.rfind("! ", 0, most))
    return text[:end] if end > 0 else textwrap.shorten(text, most, placeholder=" ...")


@contextmanager
def no_bars() -> Iterator[None]:
    """Keep the libraries' progress bars and load reports out of a run's lines."""
    logging_of = transformers.utils.logging
    shown, level = logging_of.is_progress_bar_enabled(), logging_of.get_verbosity()
    datasets_bars, hub_level = datasets.is_progress_bar_enabled(), hub_logging.get_verbosity()
    logging_of.disable_progress_bar()
    logging_of.set_verbosity_error()
    hub_logging.set_verbosity(logging.ERROR)  # which else tells each of its attempts
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


def load_data(spec: DataSpec) -> datasets.DatasetDict:
    """Load `train` and the server's test splits, by the names that the preset gives them."""
    splits = every_split(spec.name, spec.subset, spec.revision)
    split_names = {"train": spec.train, **dict(spec.tests)}
    # Without a split `test`, some of `train` is held back.
    held_back = {"test"} if [split for _, split in spec.tests] == ["test"] != [spec.train] else ()
    if lacking := [x for x in split_names.values() if x not in {*splits, *held_back}]:
        raise ValueError(
            f"data {spec.name}: got the splits {', '.join(splits)}, expected {', '.join(lacking)}; "
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

    Of `foreign` examples (of no preset) a folder has no subsets, and images have the label of
    their folder, be there one folder or many.
    """
    if is_idx(Path(name)):
        return idx_splits(Path(name))
    source = _source(name, subset, revision, foreign)
    with telling("data", name, revision):
        if foreign and datasets.load_dataset_builder(**source).name == "imagefolder":
            source["drop_labels"] = False
        splits = datasets.load_dataset(**source)
    return datasets.DatasetDict({split: as_files(examples) for split, examples in splits.items()})


def _source(name: str, subset: str, revision: str, foreign: bool) -> dict[str, Any]:
    """Describe a data set of the hub, a folder or a file to `datasets`."""
    place = Path(name)
    if not place.exists():
        return {"path": name, "name": subset or None, "revision": revision or None}
    if place.is_file():
        if (kind := TABLES.get(place.suffix.lower())) is None:
            raise ValueError(
                f"data {place}: got a file of kind {place.suffix!r}, expected "
                f"{', '.join(TABLES)}, or a folder; name another"
            )
        options = CSV if kind == "csv" else {}
        cache = str(cache_of(place, [place]))
        return {"path": kind, "data_files": str(place), "cache_dir": cache} | options
    # A copy of the hub's repository has its subsets in README.md; any other folder, as folders.
    if subset and not (place / "README.md").is_file():
        if (place / subset).is_dir():
            place /= subset
        elif not foreign:
            raise ValueError(
                f"data {place}: it has no folder {subset}, expected the preset's task in it, as "
                f"{subset}/train.parquet, say; for a task of your own write a preset, "
                f"`ravan-flwr new NAME --data {place} --model MODEL`"
            )
        subset = ""
    files = visible_files(place)
    check_one_kind(place, files)
    options = CSV if {path.suffix.lower() for path in files} == {".csv"} else {}
    cache = str(cache_of(place, files))
    return {"path": str(place), "name": subset or None, "cache_dir": cache} | options


def check_one_kind(folder: Path, files: Sequence[Path]) -> None:
    """Raise ValueError for tables of several kinds, of which `datasets` reads one."""
    if (folder / "README.md").is_file():  # of the hub, which may name the files
        return
    # Images may have a table beside them.
    kinds = {path.suffix.lower() for path in files if path.stem != "metadata"} & TABLES.keys()
    if len(kinds) > 1 and kinds != {".json", ".jsonl"}:  # both are read
        raise ValueError(
            f"data {folder}: got files of the kinds {', '.join(sorted(kinds))}, expected one kind, "
            "since only one would be read; take the others out"
        )


def visible_files(place: Path) -> list[Path]:
    """List what `datasets` may read in a folder: nothing hidden, nor in folders like `__MACOSX`.

    Anything else is its own only file.
    """
    if not place.is_dir():
        return [place]
    return [
        path
        for path in sorted(place.rglob("*"))
        if not path.is_dir()
        and path.name not in FILES_TO_IGNORE
        and not any(name.startswith((".", "__")) for name in path.relative_to(place).parts)
    ]


def cache_of(path: Path, files: Sequence[Path]) -> Path:
    """Choose the cache of what `datasets` makes of a user's file or folder, by its files' state.

    Its own cache takes two folders with the same names in them for one, whatever their content.
    Raise ValueError for files that it has not read yet, and that it had better not.
    """
    digest = hashlib.sha256(str(path.resolve()).encode())
    for file in files:
        if not file.exists():
            raise ValueError(f"{file} is a link to nothing, expected a file; remove it")
        if not file.is_file():
            check_file(file)  # `datasets` would see no file there
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
