"""Keep a run's result on a device: the folder that the server has, next to those of other runs.

    RESULT-PATH/RUN/adapter/        or merged/: what the exports write, with a model card
    RESULT-PATH/RUN/delivered.json  which run it is of, and a checksum of every file

It is written beside and flushed to disk before it gets its name, so that a folder RUN is always
whole. What the same run delivered before is replaced, or left as it is where it is the same. What
anybody else made there is never touched, neither a folder RUN nor a file in it.
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

from ravan_flwr.files import flush_folder, read_file
from ravan_flwr.messages.parcel import Parcel, check_state
from ravan_flwr.methods.tensors import Tensors, checksum
from ravan_flwr.reports.card import fill_card
from ravan_flwr.reports.export import natural_form, write_result
from ravan_flwr.runs.record import Summary
from ravan_flwr.specs import RESULT_FOLDERS
from ravan_flwr.training.model_and_data import ModelAndData

MARK = "delivered.json"


def keep_result(
    place: Path,
    parcel: Parcel,
    state: Mapping[str, Tensor],
    loaded: ModelAndData,
    folder: str | None,
    writer: str,
    own: Tensors | None = None,
) -> str:
    """Write the result in `state` below `place`; return the name of the folder that holds it.

    `own` is the device's part of the model, where each has one, and then the result is the model of
    this device alone. `folder` is that which the device wants, None for that of the server.
    `writer` tells apart those who write to one place at the same time.
    """
    check_state(state, loaded.model.initial_state(), parcel.checksum)
    form = _form_of(folder, loaded)
    target = place / parcel.run
    mark = {
        "run": parcel.run,
        "run-id": parcel.run_id,
        "round": parcel.last_round,
        "checksum": parcel.checksum,
        "folder": RESULT_FOLDERS[form],
    }
    if own is not None:
        mark["own-part"] = checksum(own)
    if not place.is_dir():
        place.mkdir()  # with more that is missing the path is a mistake
    if _is_there(target, mark):
        return RESULT_FOLDERS[form]
    draft = place / f".{parcel.run}.{writer}.tmp"
    _remove(draft)  # of a process that was ended
    try:
        _write(draft / RESULT_FOLDERS[form], form, parcel, state, loaded, own)
        _seal(draft, mark)
        _put(draft, target, place / f".{parcel.run}.{writer}.old")
    finally:
        _remove(draft)
    return RESULT_FOLDERS[form]


def _form_of(folder: str | None, loaded: ModelAndData) -> str:
    """Choose the form of the folder that the device wants; ValueError if there is none."""
    natural = natural_form(loaded)
    form = {name: form for form, name in RESULT_FOLDERS.items()}[folder] if folder else natural
    if form == "peft" and natural != "peft":
        raise ValueError(
            f"its result-form is 'adapter', but method {loaded.config.method!r} changes pretrained "
            "weights, which no adapter holds; expected 'merged'; set that, or leave it out"
        )
    return form


def _is_there(target: Path, mark: Mapping[str, Any]) -> bool:
    """Tell whether the result is there already; ValueError if what somebody else made is."""
    if not os.path.lexists(target):
        return False
    old_mark, stays = _mark_of(target), "and which stays as it is; move it away, and deliver again"
    if old_mark is None or old_mark.get("run-id") != mark["run-id"]:
        raise ValueError(
            f"its result-path has {target.name!r} already, which this run did not write, {stays}"
        )
    ours, digests = old_mark.pop("files", None), _digests(target)
    if old_mark == mark and isinstance(ours, dict) and ours and ours.items() <= digests.items():
        return True
    files = sorted(digests.keys() - (ours if isinstance(ours, dict) else ()))
    if files:
        raise ValueError(
            f"its result-path has {files[0]!r} in {target.name!r}, which this run did not write, "
            f"{stays}"
        )
    return False


def _mark_of(target: Path) -> dict[str, Any] | None:
    """Read what lies there says of itself; None if it is nothing that was delivered."""
    path = target / MARK
    if target.is_symlink() or path.is_symlink():
        return None
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_file(path))
        return content if isinstance(content, dict) else None
    return None


def _write(
    folder: Path,
    form: str,
    parcel: Parcel,
    state: Mapping[str, Tensor],
    loaded: ModelAndData,
    own: Tensors | None,
) -> None:
    folder.mkdir(parents=True)
    with loaded.model.holding(state, own):
        write_result(form, folder, loaded)
    summary = cast(Summary, parcel.run_summary)
    fill_card(folder, form, loaded.config.as_dict(), summary, summary["metrics"]["final"])


def _seal(draft: Path, mark: Mapping[str, Any]) -> None:
    """Write the mark, and flush all files and folders to disk."""
    content = json.dumps({**mark, "files": _digests(draft)}, indent=2) + "\n"
    (draft / MARK).write_text(content, encoding="utf-8")
    for path in [*draft.rglob("*"), draft]:
        _flush(path)


def _digests(folder: Path) -> dict[str, str]:
    """Hash every file but the mark, by its path in the folder."""
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
            os.fsync(file.fileno())


def _put(draft: Path, target: Path, former: Path) -> None:
    """Give the folder its name; what has the name is moved aside first, and comes back on error."""
    _remove(former)
    with suppress(FileNotFoundError):
        target.rename(former)
    try:
        draft.rename(target)
    except OSError:
        with suppress(OSError):
            former.rename(target)
        raise
    _flush(target.parent)
    _remove(former)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)
