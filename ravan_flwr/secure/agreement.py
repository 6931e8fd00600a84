"""Agree on keys between two clients, and make streams and sealed texts of them.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and Poly1305 (RFC 8439), all by the
library `cryptography`. The tests compare each function with its RFC's published vectors.
"""

from collections.abc import Callable

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY = 32  # bytes of any key here, private, public or derived
TAG = 16  # bytes that sealing adds
NONCE = 12


def new_key() -> bytes:
    """Make a private key of the system's entropy."""
    return X25519PrivateKey.generate().private_bytes_raw()


def public_of(private: bytes) -> bytes:
    """Compute the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Compute what both sides know; ValueError for a public key with which all secrets are one."""
    key = X25519PrivateKey.from_private_bytes(private)
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError("got a public key of low order, expected another") from None


def derive(secret: bytes, salt: bytes, info: bytes, length: int = KEY) -> bytes:
    """Derive a key for one purpose."""
    return HKDF(SHA256(), length, salt, info).derive(secret)


def keystream(key: bytes, nonce: bytes) -> Callable[[int], bytes]:
    """Make a stream from its block 0, piece by piece; no key and nonce are used twice."""
    start = bytes(4) + nonce  # the number of the first block, then the nonce
    encryptor = Cipher(algorithms.ChaCha20(key, start), None).encryptor()
    return lambda length: encryptor.update(bytes(length))


def seal(key: bytes, text: bytes, bound: bytes, nonce: bytes = bytes(NONCE)) -> bytes:
    """Encrypt a text that opens only beside the same `bound`; a key seals one text."""
    return ChaCha20Poly1305(key).encrypt(nonce, text, bound)


def open_sealed(key: bytes, sealed: bytes, bound: bytes, nonce: bytes = bytes(NONCE)) -> bytes:
    """Decrypt a text; ValueError if it was not sealed so."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, bound)
    except InvalidTag:
        raise ValueError("got a text that was not sealed for this, expected one that was") from None
