"""Detect whether a SuperNode started this process, and find the private folders of its user.

One folder has the warm worker's socket. The other has files that must survive a restart of the
device.
"""

import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from ravan_flwr.flower_private import TaskIdentity, flower_home

log = logging.getLogger(__name__)

MAX_FOLDER_BYTES = 85  # bytes: a socket's whole path has room for 104 on some systems
_NONE = 1  # task ids up to this belong to processes that no SuperNode started


def is_on_a_device() -> bool:
    """Return whether a SuperNode started this process; in others, messages are never concurrent."""
    return find_task() > _NONE


def find_task() -> int:
    """Return the id of the Flower task that this process does; 0 if there is none."""
    try:
        return TaskIdentity.task_id
    except RuntimeError:  # Flower has set none
        return 0


def adopt_task(number: int) -> None:
    """Set the task id of this process: a warm worker takes that of the process it answers for."""
    TaskIdentity.task_id = number


@contextmanager
def locked_file(name: str) -> Iterator[BinaryIO]:
    """Open a private file of this user for appending, locked against other processes."""
    import fcntl  # noqa: PLC0415 (POSIX alone has it, and devices alone need it)

    parent = persistent_folder()
    if parent is None:
        log.warning(
            "%s: it cannot be written to, is a link, or others can enter it, expected a folder of "
            "user %d alone: this device's privacy account is lost with its temporary files",
            *(_persistent_path(), os.getuid()),
        )
        parent = private_folder()
    folder = parent / "once"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file


def persistent_folder() -> Path | None:
    """Return this user's private folder in FLWR_HOME; None if it cannot be made or used."""
    folder = _persistent_path()
    with suppress(OSError):  # the path is no folder, or it cannot be written to
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if _is_private(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _persistent_path() -> Path:
    return flower_home() / "ravan-flwr"


def private_folder() -> Path:
    """Return a folder for sockets and files that only this user can enter.

    All client processes of a SuperNode find the same folder: that of the session, else one with the
    user's number in the folder for temporary files. If another user has made that folder, to block
    this one, the folder gets an unpredictable name.
    """
    shared = Path(tempfile.gettempdir()) / f"ravan-flwr-{os.getuid()}"
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    for folder in ([session / "ravan-flwr"] if _is_private(session) else []) + [shared]:
        with suppress(OSError):  # the path is no folder, or it cannot be written to
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_private(folder):
            return folder
    log.warning(
        "%s: another user made it, or others can enter it, expected a folder of user %d alone; "
        "the warm worker's socket gets another one. Remove it, or set XDG_RUNTIME_DIR",
        shared,
        os.getuid(),
    )
    for folder in sorted(shared.parent.glob(f"{shared.name}-*")):
        if _is_private(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{shared.name}-"))


def _is_private(folder: Path) -> bool:
    """Return whether this is a folder, and no link to one, that only this user can enter."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    is_private = info.st_uid == os.getuid() and not info.st_mode & 0o077
    return stat.S_ISDIR(info.st_mode) and is_private


def find_socket_folder() -> Path:
    """Return the private folder; RuntimeError if a socket's path in it is too long."""
    folder = private_folder()
    length = len(os.fsencode(folder))
    if length > MAX_FOLDER_BYTES:
        raise RuntimeError(
            f"{folder}: got a path of {length} bytes, expected at most {MAX_FOLDER_BYTES} for the "
            "warm worker's socket; set a shorter XDG_RUNTIME_DIR or TMPDIR"
        )
    return folder
