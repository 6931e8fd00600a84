"""Open untrusted files: only regular files, up to a size limit. Write files to disk.

Reading a pipe without a writer would block for ever, and a device such as `/dev/zero` has no end.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

if TYPE_CHECKING:
    from pydantic import ValidationError

TEXT = 2**26  # bytes of a file that is read into memory whole
LARGE = 2**36  # bytes of a file of examples, of weights, or of a run's records
_UNPACKED, _RATIO = 2**28, 100  # a file may unpack to so many bytes, or so many times its size


@contextmanager
def opened(path: Path, max_bytes: int) -> Iterator[BinaryIO]:
    """Open a regular file of up to `max_bytes` bytes; raise ValueError for other files."""
    with open(path, "rb", opener=_open_nonblocking) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise ValueError(
                f"{path} is a pipe or a device, expected a regular file; put one in its place"
            )
        if status.st_size > max_bytes:
            raise ValueError(
                f"{path} has {status.st_size:,} bytes, expected {max_bytes:,} at most; "
                "name another file"
            )
        yield file


def _open_nonblocking(path: str, flags: int) -> int:
    """Open a path without blocking on a pipe that has no writer."""
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0), 0o666)


def read_file(path: Path, max_bytes: int = TEXT) -> bytes:
    """Read a regular file of at most `max_bytes` bytes."""
    with opened(path, max_bytes) as file:
        return file.read()


def check_file(path: Path, max_bytes: int = LARGE) -> None:
    """Raise ValueError unless this is a regular file of at most `max_bytes` bytes."""
    with opened(path, max_bytes):
        pass


def write_atomically(path: Path, data: bytes, mode: int = 0o666, *, durable: bool = True) -> None:
    """Write a temporary file, flush it to disk, rename it: no reader ever sees half a file.

    A file that is not `durable` is not flushed, and may be lost if the machine loses power.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with named_errors(path):
        try:
            temporary.unlink(missing_ok=True)
            with open(temporary, "xb", opener=partial(os.open, mode=mode)) as file:
                file.write(data)
                if durable:
                    flush(file)
            temporary.replace(path)
            if durable:
                flush_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def append(file: BinaryIO, data: bytes) -> None:
    """Append to an open file; the data is on disk when this returns."""
    file.write(data)
    flush(file)


def flush(file: BinaryIO) -> None:
    """Flush an open file to disk."""
    file.flush()
    os.fsync(file.fileno())


@contextmanager
def named_errors(path: Path) -> Iterator[None]:
    """Add the file's name to OSErrors: the error of a full disk has none."""
    try:
        yield
    except OSError as error:
        if error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


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
