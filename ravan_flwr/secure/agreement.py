"""Agree on keys between two clients; make streams, sealed texts, marks and signed texts of them.

X25519 (RFC 7748), HKDF with SHA-256 (RFC 5869), ChaCha20 and Poly1305 (RFC 8439), all by the
library `cryptography`. The tests compare each function with its RFC's published vectors.
"""

import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY = 32  # bytes of any key here, private, public or derived
TAG = 16  # bytes that sealing adds
NONCE = 12
SIGNATURE = 64  # bytes
MARK = 16  # bytes by which the server knows a share when it sees it
ENTRY = 2 * KEY + SIGNATURE  # bytes of a client in the roll

Parts = Mapping[str, bytes]  # what a message has, by name


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


# What both halves of a round agree on: what is signed, hashed, and derived.


def signed_keys(run: int, round_: int, partition: int, keys: bytes) -> bytes:
    """Write what a client signs of its keys of a round."""
    return b"ravan-flwr secure keys" + struct.pack("<QQQ", run, round_, partition) + keys


def statement_of(schedule: bytes, roll: bytes) -> bytes:
    """Hash all that the clients of a round must agree on."""
    length = struct.pack("<Q", len(schedule))
    return hashlib.sha256(b"ravan-flwr secure round" + length + schedule + roll).digest()


def signed_list(statement: bytes, dealers: bytes, alive: bytes) -> bytes:
    """Write what a client signs of who has sent numbers: who is not in it counts as dropped."""
    return b"ravan-flwr secure list" + statement + dealers + alive


def marks_of(
    statement: bytes, dealer: int, holder: int, shares: Sequence[bytes], first: int = 0
) -> bytes:
    """Hash shares, so that the server can tell them from false ones; it tells nothing of them."""
    start, marks = b"ravan-flwr secure mark" + statement, b""
    for index, share in enumerate(shares, first):
        place = struct.pack("<QQQ", dealer, holder, index)
        marks += hashlib.sha256(start + place + share).digest()[:MARK]
    return marks


def seed_mark(statement: bytes, dealer: int, group: int, seed: bytes) -> bytes:
    """Hash a client's seed of a group, for the same purpose."""
    place = struct.pack("<QQ", dealer, group)
    return hashlib.sha256(b"ravan-flwr secure seed" + statement + place + seed).digest()[:MARK]


def sealing_key(secret: bytes, statement: bytes, dealer: int, holder: int) -> bytes:
    """Derive the key under which one client gives another its shares."""
    info = b"ravan-flwr secure shares" + struct.pack("<QQ", dealer, holder)
    return derive(secret, statement, info)


def pair_key(secret: bytes, statement: bytes, first: int, second: int) -> bytes:
    """Derive the key of two clients' masks, in either order, from their shared secret."""
    low, high = sorted((first, second))
    return derive(secret, statement, b"ravan-flwr secure pair" + struct.pack("<QQ", low, high))


def own_key(seed: bytes, statement: bytes, partition: int, group: int) -> bytes:
    """Derive the key of a client's own masks of a group from its seed for that."""
    info = b"ravan-flwr secure own" + struct.pack("<QQ", partition, group)
    return derive(seed, statement, info)
