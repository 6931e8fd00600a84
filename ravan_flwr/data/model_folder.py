"""Find the files of a model: in a user's folder, in the hub's cache, or by download.

Files in the cache are used without a request to the hub. So a device works offline once
`hf download` has run, and a client process starts without waiting for the network.
"""

import json
import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors import safe_open

from ravan_flwr.data.hub import hub_errors
from ravan_flwr.files import LARGE, check_file, read_file
from ravan_flwr.specs import ModelSpec

# Weights are read from safetensors only: every other format runs code when it is opened.
FILES = ["*.json", "*.safetensors", "*.model", "*.txt", "*.jinja"]
MAX_BYTES = 2**28  # of any file other than weights
WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
_ADAPTER = "adapter_config.json"
PROCESSOR = "preprocessor_config.json"  # of images
_HOW_TO_MAKE = "save it with save_pretrained of transformers 5, or as docs/reference.md says"


def pretrained_folder(name: str) -> Path:
    """Return the folder where a script of `scripts/` saves the backbone that it pretrains."""
    return Path.home() / "ravan-flwr" / "models" / name


def model_folder(spec: ModelSpec) -> Path:
    """Return the folder with a model's files, a user's or one in the hub's cache, after checks."""
    folder = _find_folder(spec, FILES, missing_file)
    if missing := missing_file(folder):
        raise ValueError(
            f"model {spec.name}: {folder} has no {missing}, expected config.json and weights as "
            f"safetensors; {_HOW_TO_MAKE}, or choose another model"
        )
    if (folder / _ADAPTER).exists():
        raise ValueError(
            f"model {spec.name}: {folder} has an {_ADAPTER}, expected a model without an adapter, "
            "which transformers would load beside it; merge it into the model, or take it away"
        )
    for path in folder.iterdir():
        if any(path.match(pattern) for pattern in FILES) and not path.is_dir():
            with model_file_errors(spec.name, path.name):
                check_file(path, LARGE if path.suffix == ".safetensors" else MAX_BYTES)
    settings_in(folder, spec.name)
    return folder


def read_config_json(spec: ModelSpec) -> dict[str, Any]:
    """Read a model's config.json, whether its weights are present or not."""
    folder = _find_folder(spec, ["config.json"], lambda path: not (path / "config.json").exists())
    path = folder / "config.json"
    if not path.is_file():
        raise ValueError(f"model {spec.name}: {folder} has no config.json; choose another model")
    return settings_in(folder, spec.name)


def settings_in(folder: Path, model: str) -> dict[str, Any]:
    """Read a model's config.json, without keys that choose code; ValueError for absurd sizes."""
    settings = read_json(folder / "config.json", model)
    with model_file_errors(model, "config.json"):
        settings = {key: _checked(key, value) for key, value in settings.items()}
    return {key: value for key, value in settings.items() if value is not _REMOVED}


# Keys that choose code or other files, which transformers may download, and the number of classes,
# which the task determines; each with the harmless values that are kept.
_HARMLESS: Mapping[str, Collection[Any]] = {
    **dict.fromkeys(("attn_implementation", "_attn_implementation"), ("eager", "sdpa", None)),
    **dict.fromkeys(("experts_implementation", "_experts_implementation"), ("eager", None)),
    **dict.fromkeys(("auto_map", "custom_pipelines", "fusion_config", "kernel_config"), ()),
    **dict.fromkeys(("distributed_config", "transformers_weights", "num_labels"), ()),
}
_REMOVED = object()
_LARGEST = 2**24  # of an integer: positions, vocabulary
_DEEPEST = 2**10  # of an integer that counts layers
_DEPTH_KEY, _NOT_A_SIZE = re.compile("(layer|depth|block|stage)s?$"), re.compile("theta|base$")


def _checked(key: str, value: Any) -> Any:
    """Return a value of config.json, checked with all nested ones; `_REMOVED` if not allowed."""
    if key in _HARMLESS and not (isinstance(value, str | None) and value in _HARMLESS[key]):
        return _REMOVED
    if key == "quantization_config" and value:
        raise ValueError(f"{key}: its weights are quantized, expected plain ones")
    if isinstance(value, dict):
        values = {name: _checked(name, inner) for name, inner in value.items()}
        return {name: inner for name, inner in values.items() if inner is not _REMOVED}
    if isinstance(value, list):
        return [_checked(key, inner) for inner in value]
    max_size = _DEEPEST if _DEPTH_KEY.search(key) else _LARGEST
    if type(value) is int and abs(value) > max_size and not _NOT_A_SIZE.search(key):
        raise ValueError(f"{key} = {value:,}, expected {max_size:,} at most")
    return value


def read_json(path: Path, model: str) -> dict[str, Any]:
    """Return the object in a JSON file of a model."""
    with model_file_errors(model, path.name):
        content = json.loads(read_file(path, MAX_BYTES))
        if not isinstance(content, dict):
            raise TypeError(f"it contains a {type(content).__name__}, not an object")
    return content


@contextmanager
def model_file_errors(model: str, files: str) -> Iterator[None]:
    """Turn any exception of a library that reads a model's files into a ValueError."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        if "allocate" in str(error):  # PyTorch ran out of memory
            raise
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
        raise ValueError(
            f"model {model}: its {files} cannot be used ({reason}), expected what save_pretrained "
            "of transformers 5 writes; download or save the model again, or choose another one"
        ) from error


def _find_folder(
    spec: ModelSpec, files: list[str], is_incomplete: Callable[[Path], object]
) -> Path:
    """Return a user's folder, or the one in the hub's cache; download if that is incomplete."""
    folder = Path(spec.name)
    if folder.is_dir():
        return folder
    if folder.is_absolute():
        raise ValueError(
            f"model {folder}: found no such folder, expected config.json and weights as "
            "safetensors there; has it moved? Name its place: model=/path, or model.name in the "
            f"preset; for a run that has ended --model /path (in Python model=). Or {_HOW_TO_MAKE}"
        )
    options: dict[str, Any] = {"revision": spec.revision or None, "allow_patterns": files}
    with suppress(LocalEntryNotFoundError):
        folder = Path(snapshot_download(spec.name, local_files_only=True, **options))
        if not is_incomplete(folder):
            return folder
    with hub_errors("model", spec.name, spec.revision):
        return Path(snapshot_download(spec.name, **options))


def missing_file(folder: Path) -> str:
    """Return the name of a required file that a model's folder lacks; "" if none."""
    if not (folder / "config.json").is_file():
        return "config.json"
    return next((path.name for path in weight_files(folder) if not path.is_file()), "")


def weight_files(folder: Path) -> list[Path]:
    """List the files of a model's weights, existing or not, as transformers finds them."""
    if (folder / WHOLE).is_file() or not (folder / _INDEX).is_file():
        return [folder / WHOLE]
    content = read_json(folder / _INDEX, str(folder))
    with model_file_errors(str(folder), _INDEX):
        parts = sorted(set(content["weight_map"].values()))
        if wrong := [part for part in parts if Path(part).name != part]:
            raise ValueError(f"{wrong[0]!r} is no file of this folder")
    return [folder / part for part in parts]


def check_weights(folder: Path, model: str) -> tuple[int, int]:
    """Return how many tensors and numbers a model's weights have.

    Raise ValueError if a weight file is truncated or not safetensors.
    """
    tensors = numbers = 0
    for path in weight_files(folder):
        # Only the header is read, and compared with the file's size.
        with model_file_errors(model, path.name), safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 (it is not a mapping)
                tensors += 1
                numbers += math.prod(file.get_slice(name).get_shape())
    return tensors, numbers
