"""Compute a checksum of this package's own files, by which server and client compare apps."""

import hashlib
import importlib.metadata
import subprocess
from functools import cache
from pathlib import Path

# Subpackages that no app imports and the app bundle omits.
NOT_IN_APPS = (
    "cli",
    "lab",
    "launch",
    "peft",
    "preset_wizard",
    "strategies",
)


@cache
def code_fingerprint() -> str:
    """Return a hash of the two apps' files, as imported, computed once in a process.

    A SuperNode has the server's files from the app bundle, but Ray's actors in a simulation
    import from the working directory of the SuperLink first, which may be another checkout.

    A process runs the files that it has read. Later edits of the checkout do not affect it, so the
    hash is cached.
    """
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        name = path.relative_to(package)
        if name.parts[0] in NOT_IN_APPS:
            continue
        digest.update(name.as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def code_version() -> str:
    """Return the package's version and, of a checkout, its commit: 0.6.0+1a2b3c4, or ...-dirty.

    Without an installed package, as in an app bundle, return the checksum of the files.
    """
    root = Path(__file__).resolve().parents[2]
    try:
        version = importlib.metadata.version("ravan-flwr")
    except importlib.metadata.PackageNotFoundError:
        return f"files {code_fingerprint()}"
    if not (root / ".git").exists():
        return version
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude", "*"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return version
    return f"{version}+{result.stdout.strip()}"
