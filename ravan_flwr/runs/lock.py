"""Let one process at a time write to a run directory.

The lock is one of the operating system, on the file `lock`, which names the process that holds it.
The system releases the lock when the process ends in any way. After a crash the file remains, but
does not prevent another process. Where files cannot be locked (some network filesystems), a run
continues without a lock and logs a warning; a private run ends with an error.
"""

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from logging import getLogger
from pathlib import Path

from filelock import FileLock, Timeout

from ravan_flwr.files import read_file

log = getLogger(__name__)

NAME = "lock"
_MAX_BYTES = 1024  # of the file
_TIMEOUT = 0.2  # seconds: the process that holds the lock may be removing the file


@contextmanager
def locked(folder: Path, key: str = "resume", *, needed: bool = False) -> Iterator[None]:
    """Hold the lock on a run directory; raise ValueError if another process holds it.

    If the directory cannot be locked, raise ValueError if the lock is `needed`, else log a warning.
    """
    path = folder / NAME
    # Not a soft lock, which is the existence of a file: it would outlast a crash.
    lock = FileLock(path, _TIMEOUT, mode=0o644, thread_local=False, fallback_to_soft=False)
    try:
        lock.acquire()
    except Timeout:
        process = "another process"
        with suppress(OSError, ValueError):
            process = read_file(path, _MAX_BYTES).decode() or process
        raise ValueError(
            f"{key} = {str(folder)!r}: got a run that {process} is writing to, "
            "expected one that no process writes to; wait until it ends, or end that process"
        ) from None
    except OSError as error:
        if needed:
            raise ValueError(
                f"{key} = {str(folder)!r}: it cannot be locked ({error}), expected a filesystem "
                "with locks: two processes that continue a private run would each count only the "
                "budget that they spend; copy the run to a local disk, and remove it here"
            ) from None
        message = "%s cannot be locked (%s): make sure that no other process continues this run"
        log.warning(message, folder, error)
        yield
        return
    try:
        with suppress(OSError):  # a full disk, or Windows, where a locked file cannot be read
            path.write_text(f"process {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        with suppress(OSError):
            path.unlink()  # while the lock is held, so that no process has locked this file
        lock.release()
