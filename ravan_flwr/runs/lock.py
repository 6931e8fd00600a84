"""Let one process at a time write to a run directory.

The lock is `flock` on the file `lock` in it, which says who holds it. The system gives it up with
the process, however that ends: a crash leaves the file, and nothing that is in the way. Where
there is no `flock` (Windows, some network filesystems) a run goes on without, and says so; a
private one does not.
"""

import os
import re
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import getLogger
from pathlib import Path
from typing import Literal

import psutil

from ravan_flwr.files import read_file

log = getLogger(__name__)

NAME = "lock"
_MOST = 1024  # bytes of it


@contextmanager
def locked(folder: Path, asked: str = "resume", *, needed: bool = False) -> Iterator[None]:
    """Hold the lock on a run directory; ValueError if another process has it.

    Where there can be none, ValueError if it is `needed`, else a warning.
    """
    descriptor: int | None
    try:
        descriptor = _acquire(folder / NAME)
    except BlockingIOError:
        raise ValueError(
            f"{asked} = {str(folder)!r}: got a run that {_holder(folder / NAME)} is writing to, "
            "expected one that nobody works on; wait until it ends, or end that process"
        ) from None
    except OSError as error:
        if needed:
            raise ValueError(
                f"{asked} = {str(folder)!r}: it cannot be locked ({error}), expected a place where "
                "it can: if two processes went on with a private run, each would count what it "
                "spends alone; copy the run to a local disk, and remove it here"
            ) from None
        message = "%s cannot be locked (%s): make sure that no other process continues this run"
        log.warning(message, folder, error)
        descriptor = None
    try:
        yield
    finally:
        if descriptor is not None:
            (folder / NAME).unlink(missing_ok=True)  # while it is held: nobody else takes this one
            os.close(descriptor)


Holder = Literal["nobody", "a process", "a dead process", "unknown"]


def holder_of(folder: Path) -> Holder:
    """Tell who writes to a run directory, without a lock that would be in the way of another run.

    A process on another machine is unknown, and so is one where there is no `flock`.
    """
    path = folder / NAME
    try:
        told, written = read_file(path, _MOST).decode(), path.stat().st_mtime
    except FileNotFoundError:
        return "nobody"
    except (OSError, ValueError):
        return "unknown"
    match = re.fullmatch(r"process (\d{1,9}) on (.+)", told)
    if match is None or match[2] != socket.gethostname():
        return "unknown"
    try:
        lives = psutil.Process(int(match[1])).create_time() <= written + 1  # not a later namesake
    except psutil.Error:
        lives = False
    return "a process" if lives else "a dead process"


def _acquire(path: Path) -> int:
    """Lock the file, write this process's name into it, and return its descriptor."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            _lock(descriptor)
            if _is_at(descriptor, path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode())
                return descriptor
        except BaseException:
            os.close(descriptor)
            raise
        os.close(descriptor)  # its holder removed the file meanwhile: there may be another


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _holder(path: Path) -> str:
    try:
        return read_file(path, _MOST).decode() or "another process"
    except (OSError, ValueError):
        return "another process"


if sys.platform == "win32":

    def _lock(descriptor: int) -> None:
        raise OSError(f"no flock on {sys.platform} for descriptor {descriptor}")

else:
    import fcntl

    def _lock(descriptor: int) -> None:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
