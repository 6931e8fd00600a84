"""Hash large files once a machine, and not once a process.

A digest is kept in the user's cache by path, size and time of the last change. That of a file that
has just been changed is not kept: it may change again within the same tick of the clock.
"""

import hashlib
import os
import time
from contextlib import suppress
from pathlib import Path

LARGE = 64 * 2**20  # bytes; hashing less takes no longer than a glance
SETTLED = 10.0  # seconds


def file_digest(path: Path) -> bytes:
    """Hash a file by SHA-256, or remember its hash."""
    stat = path.stat()
    if stat.st_size < LARGE:
        return _hashed(path)
    identity = f"{path.resolve()}\n{stat.st_size}\n{stat.st_mtime_ns}\n{stat.st_ino}"
    kept = _cache() / hashlib.sha256(identity.encode()).hexdigest()
    with suppress(OSError, ValueError):
        digest = bytes.fromhex(kept.read_text(encoding="ascii"))
        if len(digest) == hashlib.sha256().digest_size:
            return digest
    digest = _hashed(path)
    if time.time() - stat.st_mtime > SETTLED:
        _keep(kept, digest)
    return digest


def _hashed(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


def _cache() -> Path:
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path("~/.cache").expanduser()) / "ravan-flwr" / "digests"


def _keep(place: Path, digest: bytes) -> None:
    """Write a digest whole or not at all; a cache that cannot be written is none."""
    with suppress(OSError):
        place.parent.mkdir(parents=True, exist_ok=True)
        part = place.with_name(f"{place.name}.{os.getpid()}")
        part.write_text(digest.hex(), encoding="ascii")
        part.replace(place)
