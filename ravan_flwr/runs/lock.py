"""Let one process at a time write to a run directory.

The lock is a lock of the system on the file `lock` in it, which says who holds it. The system gives
it up with the process, however that ends: a crash leaves the file, and nothing that is in the way.
Where there can be no lock (some network filesystems) a run goes on without, and says so; a private
one does not.
"""

import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path
from typing import Literal

import psutil
from filelock import FileLock, Timeout

from ravan_flwr.files import read_file

log = getLogger(__name__)

NAME = "lock"
_MOST = 1024  # bytes of it
_SECONDS = 0.2  # for a file that its holder removes while it is opened


@contextmanager
def locked(folder: Path, key: str = "resume", *, needed: bool = False) -> Iterator[None]:
    """Hold the lock on a run directory; ValueError if another process has it.

    Where there can be none, ValueError if it is `needed`, else a warning.
    """
    path = folder / NAME
    # Not a lock that is a file's existence, which a crash would leave.
    lock = FileLock(path, _SECONDS, mode=0o644, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        who = "another process"
        with suppress(OSError, ValueError):
            who = read_file(path, _MOST).decode() or who
        raise ValueError(
            f"{key} = {str(folder)!r}: got a run that {who} is writing to, "
            "expected one that no process writes to; wait until it ends, or end that process"
        ) from None
    except OSError as error:
        if needed:
            raise ValueError(
                f"{key} = {str(folder)!r}: it cannot be locked ({error}), expected a place where "
                "it can: if two processes went on with a private run, each would count what it "
                "spends alone; copy the run to a local disk, and remove it here"
            ) from None
        message = "%s cannot be locked (%s): make sure that no other process continues this run"
        log.warning(message, folder, error)
        yield
        return
    try:
        with suppress(OSError):  # a full disk, or Windows, where nobody reads it meanwhile
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while it is held: nobody else takes this one
        lock.release()


Holder = Literal["nobody", "a process", "a dead process", "unknown"]


def holder_of(folder: Path) -> Holder:
    """Tell who writes to a run directory, without a lock that would be in the way of another run.

    A process on another machine is unknown, and so is one where there can be no lock.
    """
    path = folder / NAME
    try:
        text, written = read_file(path, _MOST).decode(), path.stat().st_mtime
    except FileNotFoundError:
        return "nobody"
    except (OSError, ValueError):
        return "unknown"
    match = re.fullmatch(r"process (\d{1,9}) on (.+)", text)
    if match is None or match[2] != socket.gethostname():
        return "unknown"
    try:
        lives = psutil.Process(int(match[1])).create_time() <= written + 1  # not a later namesake
    except psutil.Error:
        lives = False
    return "a process" if lives else "a dead process"
