"""Write and read checkpoints: the global state after a round, in safetensors with a checksum.

`round-000007.safetensors` holds the tensors and, in its metadata, the round that they belong to
and a SHA-256 over both. A file whose round or checksum does not match is damaged, and the
checkpoint before it is loaded instead. The last few checkpoints are kept, and that of the best
round by the server's metric. Tensors with a slash in their names are the server's memory: what a
resumed run needs beside the state.

`clients-000007.safetensors` holds the clients' personal parameters after that round, each tensor as
PARTITION/NAME. It exists where the method has such parameters and the clients are in this process.
It is written before the round's own file, and removed with it.
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

from ravan_flwr.files import check_file, write_atomically
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.directory import check_run_exists

log = logging.getLogger(__name__)

KEPT = 3

_NAME = re.compile(r"round-(\d{6,})\.safetensors")


@dataclass(frozen=True)
class Checkpoint:
    """The state after a round, from which a run is resumed."""

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
    """Write the state after a round; remove other rounds but the last few and round `best`."""
    _write(_path(folder, round_number), round_number, state | (memory or {}))
    for number in checkpoint_rounds(folder)[:-KEPT]:
        if number != best:
            _drop(folder, number)


def save_personal_states(folder: Path, round_number: int, states: Mapping[int, Tensors]) -> None:
    """Write personal parameters by partition, before the round's checkpoint is written."""
    flat = {f"{number}/{name}": x for number, state in states.items() for name, x in state.items()}
    _write(_personal_path(folder, round_number), round_number, flat)


def load_personal_states(folder: Path, round_number: int) -> dict[int, Tensors] | None:
    """Load the personal parameters after a round, by partition; None if there is no file."""
    advice = (
        "expected the clients' personal parameters; restore it, go back with resume=RUN@N, or "
        "remove it, and every client begins anew"
    )
    path = _personal_path(folder, round_number)
    tensors = _read_if_there(path, round_number, advice)
    if tensors is None:
        return None
    states: dict[int, Tensors] = {}
    for key, tensor in tensors.items():
        partition, _, name = key.partition("/")
        if not partition.isdecimal():
            raise ValueError(f"{path} is damaged ({key!r} has no partition's number), {advice}")
        states.setdefault(int(partition), {})[name] = tensor
    return states


def checkpoint_rounds(folder: Path) -> list[int]:
    """Return the rounds that have a checkpoint, in order."""
    matches = (_NAME.fullmatch(path.name) for path in folder.glob("round-*.safetensors"))
    return sorted(int(match[1]) for match in matches if match)


def drop_after(folder: Path, round_number: int) -> None:
    """Remove the checkpoints of later rounds, the last first, and files of interrupted writes."""
    for number in reversed(checkpoint_rounds(folder)):
        if number > round_number:
            _drop(folder, number)
    for path in folder.glob(".*.tmp"):  # of a process that was killed
        path.unlink(missing_ok=True)


def load_checkpoint(folder: Path, round_number: int | None = None) -> Checkpoint:
    """Load the checkpoint of a round, by default the last one that is not damaged."""
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
    """Write the fixed tensors that a calibration round computed."""
    _write(folder / "fixed.safetensors", 0, fixed)


def load_fixed(folder: Path) -> Tensors | None:
    """Load the fixed tensors; None if there was no calibration round."""
    advice = "expected what the calibration round made; restore it, or start a new run"
    return _read_if_there(folder / "fixed.safetensors", 0, advice)


def _read_if_there(path: Path, number: int, advice: str) -> Tensors | None:
    """Read a file's tensors; None if there is no file; ValueError with advice if it is damaged."""
    if not path.exists():
        return None
    try:
        return _read(path, number)
    except _DAMAGED as error:
        raise ValueError(f"{path} is damaged ({error}), {advice}") from None


def _listed(rounds: Iterable[int]) -> str:
    return "rounds " + (", ".join(map(str, rounds)) or "(none)")


_DAMAGED = (OSError, ValueError, safetensors.SafetensorError)


def _path(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}.safetensors"


def _drop(folder: Path, number: int) -> None:
    _path(folder, number).unlink(missing_ok=True)
    _personal_path(folder, number).unlink(missing_ok=True)


def _personal_path(folder: Path, number: int) -> Path:
    return folder / f"clients-{number:06d}.safetensors"


def _write(path: Path, number: int, tensors: Tensors) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    meta = {"round": str(number), "sha256": _digest(number, tensors)}
    check_run_exists(path.parent.parent)
    write_atomically(path, safetensors.torch.save(tensors, meta))


def _digest(number: int, tensors: Tensors) -> str:
    """Return a hash of a round's number, and of its tensors' names, dtypes, shapes and bytes."""
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
    """Read a file's tensors; raise one of `_DAMAGED` unless checksum and round match."""
    check_file(path)
    with safetensors.safe_open(path, "pt") as file:
        meta = file.metadata() or {}
        tensors: Tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if meta.get("sha256") != (digest := _digest(number, tensors)):
        raise ValueError(
            f"its checksum is {digest}, expected {meta.get('sha256')}; its metadata names "
            f"round {meta.get('round')!r}"
        )
    return tensors
