"""The clients' signing keys: made on a device, whose public key is copied to all other devices.

A folder has the device's own `partition-N.key`, and the `partition-M.pub` of every client, its own
included. A client signs its keys of a round (Ed25519, RFC 8032), so neither the server nor another
client can replace them.
"""

from contextlib import suppress
from functools import cached_property
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_pem_public_key,
)

from ravan_flwr.files import read_file, write_atomically

_MAX_BYTES = 4096  # bytes of a file


class NodeKeys:
    """Sign as one client, and check other clients' signatures, by the keys of a folder."""

    def __init__(self, folder: Path, partition: int) -> None:
        self.folder, self.partition = folder, partition

    @cached_property
    def own(self) -> Ed25519PrivateKey:
        """Return this client's private key."""
        key: Ed25519PrivateKey = _key(self.folder / _name(self.partition, "key"), Ed25519PrivateKey)
        return key

    def public(self) -> bytes:
        """Return this client's public key; ValueError if its two key files are no pair."""
        public = self.own.public_key().public_bytes_raw()
        if self.read_public_key(self.partition) != public:
            raise ValueError(
                f"{_name(self.partition, 'pub')} is not of {_name(self.partition, 'key')}, "
                "expected a pair; make both again with `ravan-flwr keys`"
            )
        return public

    def sign(self, text: bytes) -> bytes:
        """Return this client's signature of a text."""
        return self.own.sign(text)

    def read_public_key(self, partition: int) -> bytes:
        """Return a client's public key; ValueError if the folder has none."""
        path = self.folder / _name(partition, "pub")
        return bytes(_key(path, Ed25519PublicKey).public_bytes_raw())

    def check(self, partition: int, signature: bytes, text: bytes) -> None:
        """Raise ValueError unless the signature is that client's, of this text."""
        if not is_signed(self.read_public_key(partition), signature, text):
            raise ValueError(
                f"partition {partition}: its signature is not by {_name(partition, 'pub')}, "
                "expected that client's own; another client signed for it, or its file is old"
            )


def is_signed(public: bytes, signature: bytes, text: bytes) -> bool:
    """Return whether the signature of the text is by this public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def make_keys(folder: Path, partition: int) -> Path:
    """Make a client's pair of keys in a folder; return the path of the public key.

    ValueError if the client has keys: other devices may have its public key.
    """
    private, public = (folder / _name(partition, kind) for kind in ("key", "pub"))
    for path in (private, public):
        if path.exists() or path.is_symlink():
            raise ValueError(
                f"{path} is there already, expected a client without keys: the other devices have "
                "its public key; remove both files to make new ones"
            )
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    open_to_all = key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        write_atomically(private, secret, 0o600)
        write_atomically(public, open_to_all, 0o644)
    except OSError as error:
        with suppress(OSError):  # a single key file would block the next attempt
            private.unlink(missing_ok=True)
        raise ValueError(
            f"{folder}: keys cannot be written there ({error.strerror}), expected a folder that is "
            "new or this user's; name another one"
        ) from None
    return public


def _name(partition: int, kind: str) -> str:
    return f"partition-{partition}.{kind}"


def _key(path: Path, kind: Any) -> Any:
    """Return the key of that kind in a file; ValueError if the file has none."""
    public = kind is Ed25519PublicKey
    problem: object = "another kind of key"
    try:
        data = read_file(path, _MAX_BYTES)
        key = load_pem_public_key(data) if public else load_pem_private_key(data, None)
        if isinstance(key, kind):
            return key
    except OSError as error:  # without the folder: the error is sent to the server
        problem = f"it cannot be read ({error.strerror})"
    except (TypeError, ValueError, UnsupportedAlgorithm) as error:
        problem = str(error).removeprefix(f"{path} ")
    raise ValueError(
        f"secure-keys: {path.name}: {str(problem)[:100]}; expected an Ed25519 "
        f"{'public' if public else 'private'} key in PEM, as `ravan-flwr keys` makes it; "
        "put the file there"
    )
