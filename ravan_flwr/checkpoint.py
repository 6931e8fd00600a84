"""Checkpoints: the global state after a round, as safetensors, with a checksum.

The tensors and what they belong to are one file, `round-000007.safetensors`; its SHA-256
stands beside it in JSON. A damaged file is passed over for the one before it.
"""

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import safetensors.torch

from ravan_flwr.methods.base import Tensors
from ravan_flwr.records import write_atomically

log = logging.getLogger(__name__)

KEPT = 3


MOMENTS = "server-optimizer/"  # before the names of the server optimiser's moments


def save_checkpoint(
    folder: Path, round_number: int, state: Tensors, moments: Tensors | None = None
) -> None:
    """Write the state after a round, then drop all but the last few."""
    tensors = state | {MOMENTS + name: tensor for name, tensor in (moments or {}).items()}
    data = safetensors.torch.save({k: v.contiguous() for k, v in tensors.items()})
    _write(folder / f"round-{round_number:06d}.safetensors", round_number, data)
    for old in sorted(folder.glob("round-*.safetensors"))[:-KEPT]:
        old.with_suffix(".json").unlink(missing_ok=True)
        old.unlink()


def save_fixed(folder: Path, fixed: Tensors) -> None:
    """Write what a calibration round fixed for the run."""
    _write(folder / "fixed.safetensors", 0, safetensors.torch.save(fixed))


def load_fixed(folder: Path) -> Tensors | None:
    """What a calibration round fixed; None if there was none."""
    path = folder / "fixed.safetensors"
    if not path.exists():
        return None
    try:
        return _read(path)[1]
    except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
        raise ValueError(
            f"{path} is damaged ({error}), expected what the calibration round made; start a new "
            "run"
        ) from None


def _write(path: Path, round_number: int, data: bytes) -> None:
    checksum = {"round": round_number, "sha256": hashlib.sha256(data).hexdigest()}
    write_atomically(path, data)
    write_atomically(path.with_suffix(".json"), json.dumps(checksum).encode())


def load_checkpoint(folder: Path) -> tuple[int, Tensors, Tensors]:
    """(round, state, server optimiser's moments) of the last checkpoint that is whole."""
    found = sorted(folder.glob("round-*.safetensors"), reverse=True)
    for path in found:
        try:
            number, tensors = _read(path)
        except (OSError, ValueError, KeyError, safetensors.SafetensorError) as error:
            log.warning("checkpoint %s is damaged (%s); trying the one before it", path, error)
            continue
        moments = {k.removeprefix(MOMENTS): v for k, v in tensors.items() if k.startswith(MOMENTS)}
        state = {k: v for k, v in tensors.items() if not k.startswith(MOMENTS)}
        return number, state, moments
    raise ValueError(
        f"no usable checkpoint in {folder}: found {[p.name for p in found]}, expected at least "
        "one whole round-*.safetensors with its .json; start a new run"
    )


def _read(path: Path) -> tuple[int, Tensors]:
    data = path.read_bytes()
    expected: dict[str, Any] = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))
    digest = hashlib.sha256(data).hexdigest()
    if digest != expected["sha256"]:
        raise ValueError(f"its checksum is {digest}, expected {expected['sha256']}")
    return int(expected["round"]), safetensors.torch.load(data)
