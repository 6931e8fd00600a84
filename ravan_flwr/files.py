"""Open untrusted files: only regular files, up to a size limit.

Reading a pipe without a writer would block for ever, and a device such as `/dev/zero` has no end.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pydantic import ValidationError

TEXT = 2**26  # bytes of a file that is read into memory whole
LARGE = 2**36  # bytes of a file of examples, of weights, or of a run's records
_UNPACKED, _RATIO = 2**28, 100  # a file may unpack to so many bytes, or so many times its size


@contextmanager
def opened(path: Path, most: int) -> Iterator[BinaryIO]:
    """Open a regular file of at most `most` bytes to read; raise ValueError for other files."""
    with open(path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{path} is a pipe or a device, expected a regular file; put one in its place"
            )
        if status.st_size > most:
            raise ValueError(
                f"{path} has {status.st_size:,} bytes, expected {most:,} at most; name another file"
            )
        yield file


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a path without blocking on a pipe that has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def read_file(path: Path, most: int = TEXT) -> bytes:
    """Read a regular file of at most `most` bytes."""
    with opened(path, most) as file:
        return file.read()


def check_file(path: Path, most: int = LARGE) -> None:
    """Raise ValueError unless this is a regular file of at most `most` bytes."""
    with opened(path, most):
        pass


def flush_folder(folder: Path) -> None:
    """Flush the names of a folder's files to disk, so that they survive a loss of power."""
    with suppress(OSError):  # some systems do not support it
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def check_unpacked(path: Path, packed: int, unpacked: int) -> None:
    """Raise ValueError if a file's content is far larger when it is unpacked."""
    if unpacked > LARGE or unpacked > max(_UNPACKED, _RATIO * packed):
        raise ValueError(
            f"{path}: its {packed:,} bytes unpack to {unpacked:,} or more, expected {LARGE:,} at "
            f"most, and {_RATIO} times the file's size; write the file anew without packing it"
        )


def first_error(error: "ValidationError") -> str:
    """Return the first of a validation's errors, in one line."""
    first = error.errors(include_url=False)[0]
    location = ".".join(map(str, first["loc"])) or "its content"
    value = "nothing" if first["type"] == "missing" else repr(first["input"])[:80]
    return f"{location}: got {value}: {first['msg']}"
