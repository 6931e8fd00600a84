"""Know whether a SuperNode has started this process, and the folders of its user alone.

In one lies its worker's socket, in the other what a device must not forget, not even when it is
started again.
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

LONGEST_FOLDER = 85  # bytes: a socket's whole path has room for 104 on some systems
_NONE = 1  # task ids up to this are of no process that a SuperNode started


def is_on_a_device() -> bool:
    """Tell whether a SuperNode has started this process: in others messages take turns."""
    return task_of_process() > _NONE


def task_of_process() -> int:
    """Return the number that Flower has given to what this process does; 0 if none."""
    try:
        return TaskIdentity.task_id
    except RuntimeError:  # Flower has said nothing
        return 0


def work_for_task(number: int) -> None:
    """Let a warm worker answer for the process of a message, with that one's number."""
    TaskIdentity.task_id = number


@contextmanager
def locked_file(name: str) -> Iterator[BinaryIO]:
    """Lend a file of this user's to one process at a time; what is written comes at its end."""
    import fcntl  # noqa: PLC0415 (POSIX alone has it, and devices alone need it)

    within = kept_folder()
    if within is None:
        log.warning(
            "%s: it cannot be written to, is a link, or others can enter it, expected a folder of "
            "user %d alone: what this device has spent is forgotten with its temporary files",
            *(_in_flowers(), os.getuid()),
        )
        within = private_folder()
    folder = within / "once"
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file


def append(file: BinaryIO, content: bytes) -> None:
    """Write at the end of such a file; it is on disk when this returns."""
    file.write(content)
    file.flush()
    os.fsync(file.fileno())


def kept_folder() -> Path | None:
    """Find the folder of this user alone in Flower's own; None if there can be none."""
    folder = _in_flowers()
    with suppress(OSError):  # something else is there, or it cannot be written to
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    return folder if _is_ours(folder) and os.access(folder, os.W_OK | os.X_OK) else None


def _in_flowers() -> Path:
    return flower_home() / "ravan-flwr"


def private_folder() -> Path:
    """Find the folder where this user can have sockets and files, and nobody else.

    All client processes of a SuperNode find the same one: that of the session, then one with the
    user's number in the folder for temporary files. Somebody else may have made that one, to keep
    us from it: then it is one with a name that nobody could know before.
    """
    shared = Path(tempfile.gettempdir()) / f"ravan-flwr-{os.getuid()}"
    session = Path(os.environ.get("XDG_RUNTIME_DIR") or "/nonexistent")
    for folder in ([session / "ravan-flwr"] if _is_ours(session) else []) + [shared]:
        with suppress(OSError):  # something else is there, or it cannot be written to
            folder.mkdir(mode=0o700, exist_ok=True)
        if _is_ours(folder):
            return folder
    log.warning(
        "%s: another user made it, or others can enter it, expected a folder of user %d alone; "
        "the warm worker's socket gets another one. Remove it, or set XDG_RUNTIME_DIR",
        shared,
        os.getuid(),
    )
    for folder in sorted(shared.parent.glob(f"{shared.name}-*")):
        if _is_ours(folder):
            return folder
    return Path(tempfile.mkdtemp(prefix=f"{shared.name}-"))


def _is_ours(folder: Path) -> bool:
    """Tell whether it is a folder, and no link to one, that this user alone can enter."""
    try:
        info = folder.lstat()
    except OSError:
        return False
    is_private = info.st_uid == os.getuid() and not info.st_mode & 0o077
    return stat.S_ISDIR(info.st_mode) and is_private


def folder_of_sockets() -> Path:
    """Find the private folder; RuntimeError if a socket's path in it is too long for the system."""
    folder = private_folder()
    length = len(os.fsencode(folder))
    if length > LONGEST_FOLDER:
        raise RuntimeError(
            f"{folder}: got a path of {length} bytes, expected at most {LONGEST_FOLDER} for the "
            "warm worker's socket; set a shorter XDG_RUNTIME_DIR or TMPDIR"
        )
    return folder
