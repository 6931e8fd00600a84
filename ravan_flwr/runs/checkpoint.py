"""Write and read checkpoints: the global state after a round, in safetensors with a checksum.

`round-000007.safetensors` holds the tensors and, in its metadata, the round that they belong to
and a SHA-256 over both: one file, which is whole and of its name, or damaged. A damaged one is
passed over for the one before it. Beside the last few, that of the best round by the server's
metric is kept. Tensors with a slash in their names are the server's memory: what a run that goes
on needs beside the state.

`clients-000007.safetensors` lies beside it where a part of the model stays with each client and the
clients are in this process: their parts after that round, each tensor as PARTITION/NAME. It is
written first and goes with the round's own file.
"""

import hashlib
import logging
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors
import safetensors.torch
import torch

from ravan_flwr.files import check_file
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.directory import check_there, write_atomically

log = logging.getLogger(__name__)

KEPT = 3

_NAME = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """Hold what a run goes on from."""

    round: int
    state: Tensors
    memory: Tensors


def save_checkpoint(
    folder: Path,
    round_number: int,
    state: Tensors,
    memory: Tensors | None = None,
    best: int | None = None,
) -> None:
    """Write the state after a round, then drop all but the last few and that of round `best`."""
    _write(_path(folder, round_number), round_number, state | (memory or {}))
    for number in checkpoint_rounds(folder)[:-KEPT]:
        if number != best:
            _drop(folder, number)


def save_personal_states(folder: Path, round_number: int, parts: Mapping[int, Tensors]) -> None:
    """Write the clients' own parts after a round, by partition; before its checkpoint."""
    flat = {f"{number}/{name}": x for number, own in parts.items() for name, x in own.items()}
    _write(_parts_path(folder, round_number), round_number, flat)


def load_personal_states(folder: Path, round_number: int) -> dict[int, Tensors] | None:
    """Load the clients' own parts after a round, by partition; None if they are not there."""
    path = _parts_path(folder, round_number)
    if not path.exists():
        return None
    parts: dict[int, Tensors] = {}
    try:
        for key, tensor in _read(path, round_number).items():
            partition, _, name = key.partition("/")
            parts.setdefault(int(partition), {})[name] = tensor
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is damaged ({error}), expected the clients' own parts of the model; restore "
            "it, go back with resume=RUN@N, or remove it, and every client begins anew"
        ) from None
    return parts


def checkpoint_rounds(folder: Path) -> list[int]:
    """List the rounds of which there is a checkpoint, in order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("round-*.safetensors"))
    return sorted(int(match[1]) for match in matches if match)


def drop_after(folder: Path, round_number: int) -> None:
    """Drop the checkpoints of later rounds, the last first, and files that were never finished."""
    for number in reversed(checkpoint_rounds(folder)):
        if number > round_number:
            _drop(folder, number)
    for path in folder.glob(".*.tmp"):  # of a process that was killed
        path.unlink(missing_ok=True)


def load_checkpoint(folder: Path, round_number: int | None = None) -> Checkpoint:
    """Load the checkpoint of a round, or the last one that is whole."""
    rounds = checkpoint_rounds(folder)
    advice = f"expected one of {_listed(rounds)}; choose another"
    if round_number not in (None, *rounds):
        raise ValueError(f"round {round_number} has no checkpoint in {folder}, {advice}")
    for number in reversed(rounds) if round_number is None else (round_number,):
        try:
            return _read_round(folder, number)
        except _DAMAGED as error:
            problem = f"checkpoint {_path(folder, number)} is damaged ({error})"
            if round_number is not None:
                raise ValueError(f"{problem}, {advice}") from None
            log.warning("%s; trying the one before it", problem)
    raise ValueError(
        f"no usable checkpoint in {folder}: found those of {_listed(rounds)}, expected at least "
        "one whole round-*.safetensors; start a new run"
    )


def save_fixed(folder: Path, fixed: Tensors) -> None:
    """Write the fixed tensors, which a calibration round made."""
    _write(folder / "fixed.safetensors", 0, fixed)


def load_fixed(folder: Path) -> Tensors | None:
    """Load the fixed tensors; None if there was no calibration round."""
    path = folder / "fixed.safetensors"
    if not path.exists():
        return None
    try:
        return _read(path, 0)
    except _DAMAGED as error:
        raise ValueError(
            f"{path} is damaged ({error}), expected what the calibration round made; restore it, "
            "or start a new run"
        ) from None


def _listed(rounds: Iterable[int]) -> str:
    return "rounds " + (", ".join(map(str, rounds)) or "(none)")


_DAMAGED = (OSError, ValueError, safetensors.SafetensorError)


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}.safetensors"


def _drop(folder: Path, number: int) -> None:
    _path(folder, number).unlink(missing_ok=True)
    _parts_path(folder, number).unlink(missing_ok=True)


def _parts_path(folder: Path, number: int) -> Path:
    return folder / f"clients-{number:06d}.safetensors"


def _write(path: Path, number: int, tensors: Tensors) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    meta = {"round": str(number), "sha256": _digest(number, tensors)}
    check_there(path.parent.parent)
    write_atomically(path, safetensors.torch.save(tensors, meta))


def _digest(number: int, tensors: Tensors) -> str:
    """Hash the number of a round, and names, dtypes, shapes and bytes of its tensors."""
    digest = hashlib.sha256(f"round {number}".encode())
    for name, tensor in sorted(tensors.items()):
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _read_round(folder: Path, number: int) -> Checkpoint:
    tensors = _read(_path(folder, number), number)
    memory = {name: tensor for name, tensor in tensors.items() if "/" in name}
    return Checkpoint(number, {k: v for k, v in tensors.items() if k not in memory}, memory)


def _read(path: Path, number: int) -> Tensors:
    """Read the tensors of a file that is whole and of that round; else raise one of `_DAMAGED`."""
    check_file(path)
    with safetensors.safe_open(path, "pt") as file:
        meta = file.metadata() or {}
        tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if meta.get("sha256") != (digest := _digest(number, tensors)):
        raise ValueError(
            f"its checksum is {digest}, expected {meta.get('sha256')}; it says that it is of round "
            f"{meta.get('round')!r}"
        )
    if meta.get("round") != str(number):
        raise ValueError(f"it is of round {meta.get('round')!r}, expected {number}")
    return tensors
