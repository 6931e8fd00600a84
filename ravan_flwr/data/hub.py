"""Get models and data sets of the Hugging Face Hub: from its cache, a folder, or downloaded.

What is in the cache is taken from there without asking the hub, so that a device without a
connection works once `ravan-flwr fetch` has run, and a client process starts without waiting
for the network. Trouble is told as what it is, with what to do.
"""

import hashlib
import json
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import datasets
import httpx
import pyarrow as pa
import transformers
from datasets.exceptions import DatasetsError
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from safetensors import safe_open

from ravan_flwr.data.idx import idx_splits, is_idx
from ravan_flwr.specs import DataSpec, ModelSpec

log = logging.getLogger(__name__)

# Weights are read from safetensors alone: every other format runs code when it is opened.
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def made_folder(name: str) -> Path:
    """Say where a backbone lies that a script of `scripts/` makes on the user's machine."""
    return Path.home() / "ravan-flwr" / "models" / name


def model_folder(spec: ModelSpec) -> Path:
    """Find the files of a model: in a folder of the user's, or in one of the hub's cache."""
    folder = Path(spec.name)
    if not _is_folder(folder):
        cached = _snapshot(spec, local_files_only=True)
        folder = cached if cached is not None and not lacks(cached) else fetch_model(spec)
    if missing := lacks(folder):
        raise ValueError(
            f"model {spec.name}: {folder} has no {missing}, expected config.json and weights as "
            f"safetensors; {_how_to_make(folder)}, or choose another model"
        )
    return folder


def _is_folder(path: Path) -> bool:
    """Tell a folder from an id of the hub; ValueError for a path where no folder is."""
    if path.is_absolute() and not path.is_dir():
        raise ValueError(
            f"model {path}: found no such folder, expected config.json and weights as safetensors "
            f"there; {_how_to_make(path)}, or name another one, model=/path"
        )
    return path.is_dir()


def _how_to_make(folder: Path) -> str:
    if folder != made_folder(folder.name):
        return "save it with save_pretrained of transformers 5"
    script = f"pretrain_{folder.name.replace('-', '_')}"
    return (
        f"make it with `python -m scripts.{script}` in a checkout of ravan-flwr, or copy the "
        "folder from a machine that has it, as each device needs the same"
    )


def fetch_model(spec: ModelSpec) -> Path:
    """Download what the cache lacks of a model."""
    if _is_folder(Path(spec.name)):
        return Path(spec.name)
    with telling("model", spec.name, spec.revision):
        folder = _snapshot(spec, local_files_only=False)
    assert folder is not None
    return folder


def config_of(spec: ModelSpec) -> dict[str, Any]:
    """Read a model's config.json, without its weights if they are not there."""
    folder = Path(spec.name)
    if not _is_folder(folder):
        with telling("model", spec.name, spec.revision):
            folder = Path(
                snapshot_download(
                    spec.name, revision=spec.revision or None, allow_patterns=["config.json"]
                )
            )
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model {spec.name}: {folder} has no config.json; choose another model")
    return read_json(path, spec.name)


def read_json(path: Path, model: str) -> dict[str, Any]:
    """Read the object in a JSON file of a model."""
    with reading(model, path.name):
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise TypeError(f"it holds a {type(content).__name__} and no object")
    return content


@contextmanager
def reading(model: str, files: str) -> Iterator[None]:
    """Turn whatever a library raises while it reads a model's files into a ValueError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "allocate" in str(error):  # PyTorch's way to say that memory ran out
            raise
        told = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise ValueError(
            f"model {model}: its {files} cannot be used ({told}), expected what save_pretrained "
            "of transformers 5 writes; download or save the model again, or choose another one"
        ) from error


def _snapshot(spec: ModelSpec, *, local_files_only: bool) -> Path | None:
    try:
        return Path(
            snapshot_download(
                spec.name,
                revision=spec.revision or None,
                allow_patterns=FILES,
                local_files_only=local_files_only,
            )
        )
    except LocalEntryNotFoundError:
        if local_files_only:
            return None
        raise


def lacks(folder: Path) -> str:
    """Say what a model's folder lacks; "" if nothing."""
    if not (folder / "config.json").is_file():
        return "config.json"
    return next((path.name for path in weight_files(folder) if not path.is_file()), "")


def weight_files(folder: Path) -> list[Path]:
    """List the files of a model's weights, there or not, as transformers finds them."""
    if (folder / WHOLE).is_file() or not (folder / _INDEX).is_file():
        return [folder / WHOLE]
    content = read_json(folder / _INDEX, str(folder))
    with reading(str(folder), _INDEX):
        parts = sorted(set(content["weight_map"].values()))
        if wrong := [part for part in parts if Path(part).name != part]:
            raise ValueError(f"{wrong[0]!r} is no file of this folder")
    return [folder / part for part in parts]


def check_weights(folder: Path, model: str) -> None:
    """Raise ValueError if a file of a model's weights is cut off or no safetensors."""
    for path in weight_files(folder):
        with reading(model, path.name), safe_open(path, framework="pt"):
            pass  # it reads the header, and compares it with the file's size


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


class NotHereError(ValueError):
    """Say that something of the hub is not here, and what can be done about it.

    `problem` and `otherwise` are for `fetch`, which cannot advise to run `fetch`.
    """

    def __init__(self, problem: str, otherwise: str) -> None:
        self.problem, self.otherwise = problem, otherwise
        super().__init__(
            f"{problem}; run `ravan-flwr fetch PRESET` where there is a connection, or {otherwise}"
        )


_UNREACHED = (
    LocalEntryNotFoundError, EntryNotFoundError, HfHubHTTPError, ConnectionError, httpx.HTTPError,
)  # fmt: skip


@contextmanager
def telling(what: str, name: str, revision: str = "") -> Iterator[None]:
    """Turn errors of the hub into a ValueError that says what to do; hide progress bars."""
    at = f"{what} {name}" + (f" at revision {revision}" if revision else "")
    try:
        with no_bars():
            yield
    except GatedRepoError as error:
        raise ValueError(
            f"{at}: the hub gives it only to those who accepted its terms; accept them on its "
            f"page, then log in with `hf auth login` or set HF_TOKEN ({_short(error)})"
        ) from None
    except RevisionNotFoundError as error:
        raise ValueError(
            f"{at}: the hub has no such revision any more; name another one, "
            f"{what}={name}@REVISION ({_short(error)})"
        ) from None
    except RepositoryNotFoundError as error:
        raise ValueError(
            f"{at}: the hub has no such {what}, or it is private; correct the id, or log in with "
            f"`hf auth login` ({_short(error)})"
        ) from None
    except _UNREACHED as error:
        raise NotHereError(
            f"{at}: it is not in the cache, and the hub cannot be reached ({_short(error)})",
            f"name a folder, {what}=/path",
        ) from None
    except (DatasetsError, FileNotFoundError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        cause = error.__cause__ or error
        if Path(name).is_dir():
            raise ValueError(
                f"{at}: its files cannot be read ({_short(cause)}), expected CSV, JSON lines, "
                "parquet or images, with the same columns and types in each; correct the files"
            ) from None
        raise NotHereError(
            f"{at}: {_short(error)}",
            "correct the id or the revision, or accept its terms, if it has any, and log in with "
            "`hf auth login`",
        ) from None


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
    drawn = datasets.is_progress_bar_enabled()
    logging_of.disable_progress_bar()
    logging_of.set_verbosity_error()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        logging_of.set_verbosity(level)
        if shown:
            logging_of.enable_progress_bar()
        if drawn:
            datasets.enable_progress_bars()
