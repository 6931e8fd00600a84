"""A checksum of this package's own files: do server and client run the same app?"""

import hashlib
from pathlib import Path


def code_fingerprint() -> str:
    """A checksum over this package's own files, wherever it was imported from.

    A SuperNode has the server's files from the app bundle, but Ray's actors in a simulation
    import from the working directory of the SuperLink first, which may be another checkout.
    """
    package = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]
