"""Write a run's result on a device: the folder that the server has, beside those of other runs.

    RESULT-PATH/RUN/adapter/        or merged/: an export, with a model card
    RESULT-PATH/RUN/delivered.json  the run that it belongs to, and a checksum of every file

The result is written to a temporary folder and flushed to disk before that is renamed to RUN, so
that a folder RUN is always complete. An earlier result of the same run is replaced, or kept if it
is identical. A folder RUN, or a file in it, that this run did not write is never changed.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from torch import Tensor

from ravan_flwr.extras.delivery.parcel import Parcel, check_state
from ravan_flwr.files import flush, flush_folder, read_file
from ravan_flwr.methods.tensors import Tensors, checksum
from ravan_flwr.results.card import fill_card
from ravan_flwr.results.export import natural_form, write_result
from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import RESULT_FOLDERS
from ravan_flwr.training.model_and_data import ModelAndData

MARK = "delivered.json"


def save_result(
    result_path: Path,
    parcel: Parcel,
    state: Mapping[str, Tensor],
    loaded: ModelAndData,
    folder: str | None,
    writer: str,
    personal_state: Tensors | None = None,
) -> str:
    """Write the result `state` below `result_path`; return the name of the folder with it.

    `personal_state` has the device's personal parameters, if the method has such; the result is
    then the model of this device. `folder` is the device's choice, None for that of the server.
    `writer` distinguishes devices that write to one result path at the same time.
    """
    check_state(state, loaded.model.idle_state, parcel.checksum)
    form = _choose_form(folder, loaded)
    target = result_path / parcel.run
    mark = {
        "run": parcel.run,
        "run-id": parcel.run_id,
        "round": parcel.last_round,
        "checksum": parcel.checksum,
        "folder": RESULT_FOLDERS[form],
    }
    if personal_state is not None:
        mark["personal"] = checksum(personal_state)
    if not result_path.is_dir():
        result_path.mkdir()  # not its parents: if they are missing, the path is a mistake
    if _is_delivered(target, mark):
        return RESULT_FOLDERS[form]
    temporary = result_path / f".{parcel.run}.{writer}.tmp"
    _remove(temporary)  # of a process that was ended
    try:
        content = temporary / RESULT_FOLDERS[form]
        content.mkdir(parents=True)
        with loaded.model.holding(state, personal_state):
            write_result(form, content, loaded)
        summary = cast(Summary, parcel.run_summary)
        fill_card(content, form, loaded.config.as_dict(), summary)
        _write_mark(temporary, mark)
        _replace(temporary, target, result_path / f".{parcel.run}.{writer}.old")
    finally:
        _remove(temporary)
    return RESULT_FOLDERS[form]


def _choose_form(folder: str | None, loaded: ModelAndData) -> str:
    """Return the form of the device's folder; raise ValueError if the method has no such form."""
    natural = natural_form(loaded)
    form = {name: form for form, name in RESULT_FOLDERS.items()}[folder] if folder else natural
    if form == "peft" and natural != "peft":
        raise ValueError(
            f"its result-form is 'adapter', but method {loaded.config.method!r} changes pretrained "
            "weights, which no adapter holds; expected 'merged'; set that, or leave it out"
        )
    return form


def _is_delivered(target: Path, mark: Mapping[str, Any]) -> bool:
    """Return whether the same result is there; raise ValueError for files of other origin."""
    if not os.path.lexists(target):
        return False
    old_mark, hint = _read_mark(target), "and which stays as it is; move it away, and deliver again"
    if old_mark is None or old_mark.get("run-id") != mark["run-id"]:
        raise ValueError(
            f"its result-path has {target.name!r} already, which this run did not write, {hint}"
        )
    ours, digests = old_mark.pop("files", None), _digests(target)
    if old_mark == mark and isinstance(ours, dict) and ours and ours.items() <= digests.items():
        return True
    files = sorted(digests.keys() - (ours if isinstance(ours, dict) else ()))
    if files:
        raise ValueError(
            f"its result-path has {files[0]!r} in {target.name!r}, which this run did not write, "
            f"{hint}"
        )
    return False


def _read_mark(target: Path) -> dict[str, Any] | None:
    """Read the mark of a folder; None if the folder was not delivered."""
    path = target / MARK
    if target.is_symlink() or path.is_symlink():
        return None
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_file(path))
        return content if isinstance(content, dict) else None
    return None


def _write_mark(folder: Path, mark: Mapping[str, Any]) -> None:
    """Write the mark, and flush all files and folders to disk."""
    content = json.dumps({**mark, "files": _digests(folder)}, indent=2) + "\n"
    (folder / MARK).write_text(content, encoding="utf-8")
    for path in [*folder.rglob("*"), folder]:
        _flush(path)


def _digests(folder: Path) -> dict[str, str]:
    """Return the hash of every file but the mark, by its path in the folder."""
    paths = sorted(path for path in folder.rglob("*") if path.is_file() and path.name != MARK)
    digests = {}
    for path in paths:
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        digests[path.relative_to(folder).as_posix()] = digest
    return digests


def _flush(path: Path) -> None:
    if path.is_dir():
        flush_folder(path)
    else:
        with path.open("r+b") as file:
            flush(file)


def _replace(folder: Path, target: Path, previous: Path) -> None:
    """Rename the folder to `target`; move an existing target aside first, and back on error."""
    _remove(previous)
    with suppress(FileNotFoundError):
        target.rename(previous)
    try:
        folder.rename(target)
    except OSError:
        with suppress(OSError):
            previous.rename(target)
        raise
    _flush(target.parent)
    _remove(previous)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
