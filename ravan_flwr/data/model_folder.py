"""Find the files of a model: in a folder of the user's, in the hub's cache, or downloaded.

What is in the cache is taken from there without asking the hub, so that a device without a
connection works once `ravan-flwr fetch` has run, and a client process starts without waiting
for the network.
"""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from ravan_flwr.data.hub_errors import telling
from ravan_flwr.specs import ModelSpec

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
