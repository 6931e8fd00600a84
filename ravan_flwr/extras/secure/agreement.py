"""Agree on keys between two clients; derive streams, sealed texts, marks and texts to sign.

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
MARK = 16  # bytes of a mark: a truncated hash by which the server checks a share
ENTRY = 2 * KEY + SIGNATURE  # bytes of a client in the key list ("roll" in messages)

Parts = Mapping[str, bytes]  # the parts of a message, by name


def new_key() -> bytes:
    """Return a private key from the system's entropy."""
    return X25519PrivateKey.generate().private_bytes_raw()


def derive_public_key(private: bytes) -> bytes:
    """Return the public key of a private one."""
    return X25519PrivateKey.from_private_bytes(private).public_key().public_bytes_raw()


def shared_secret(private: bytes, public: bytes) -> bytes:
    """Return the shared secret of two keys; ValueError for a public key of low order."""
    key = X25519PrivateKey.from_private_bytes(private)
    try:
        return key.exchange(X25519PublicKey.from_public_bytes(public))
    except ValueError:
        raise ValueError("got a public key of low order, expected another") from None


def derive(secret: bytes, salt: bytes, info: bytes, length: int = KEY) -> bytes:
    """Return a key derived for one purpose, `info`."""
    return HKDF(SHA256(), length, salt, info).derive(secret)


def keystream(key: bytes, nonce: bytes) -> Callable[[int], bytes]:
    """Return a function for the next bytes of a stream; never use key and nonce twice."""
    start = bytes(4) + nonce  # the number of the first block, then the nonce
    encryptor = Cipher(algorithms.ChaCha20(key, start), None).encryptor()
    return lambda length: encryptor.update(bytes(length))


def seal(key: bytes, text: bytes, bound: bytes, nonce: bytes = bytes(NONCE)) -> bytes:
    """Return a text encrypted and bound to `bound`; a key must seal only one text."""
    return ChaCha20Poly1305(key).encrypt(nonce, text, bound)


def open_sealed(key: bytes, sealed: bytes, bound: bytes, nonce: bytes = bytes(NONCE)) -> bytes:
    """Return a decrypted text; ValueError if key, `bound` or nonce differ from the sealing."""
    try:
        return ChaCha20Poly1305(key).decrypt(nonce, sealed, bound)
    except InvalidTag:
        raise ValueError("got a text that was not sealed for this, expected one that was") from None


# What both halves of a round must sign, hash and derive in the same way.


def signed_keys(run: int, round_: int, partition: int, keys: bytes) -> bytes:
    """Return the text that a client signs about its keys of a round."""
    return b"ravan-flwr secure keys" + struct.pack("<QQQ", run, round_, partition) + keys


def make_statement(schedule: bytes, key_list: bytes) -> bytes:
    """Return the hash of schedule and key list, on which the clients of a round must agree."""
    length = struct.pack("<Q", len(schedule))
    return hashlib.sha256(b"ravan-flwr secure round" + length + schedule + key_list).digest()


def signed_list(statement: bytes, dealers: bytes, alive: bytes) -> bytes:
    """Return the text that a client signs about which clients have sent numbers: `alive`."""
    return b"ravan-flwr secure list" + statement + dealers + alive


def mark_shares(
    statement: bytes, dealer: int, holder: int, shares: Sequence[bytes], first: int = 0
) -> bytes:
    """Return a hash of each share, by which the server recognises false shares."""
    start, marks = b"ravan-flwr secure mark" + statement, b""
    for index, share in enumerate(shares, first):
        ids = struct.pack("<QQQ", dealer, holder, index)
        marks += hashlib.sha256(start + ids + share).digest()[:MARK]
    return marks


def mark_seed(statement: bytes, dealer: int, group: int, seed: bytes) -> bytes:
    """Return a hash of a client's seed of a group, by which the server recognises a false one."""
    ids = struct.pack("<QQ", dealer, group)
    return hashlib.sha256(b"ravan-flwr secure seed" + statement + ids + seed).digest()[:MARK]


def sealing_key(secret: bytes, statement: bytes, dealer: int, holder: int) -> bytes:
    """Return the key that seals the shares of one client for another."""
    info = b"ravan-flwr secure shares" + struct.pack("<QQ", dealer, holder)
    return derive(secret, statement, info)


def pair_key(secret: bytes, statement: bytes, first: int, second: int) -> bytes:
    """Return the key of two clients' masks, in either order, from their shared secret."""
    low, high = sorted((first, second))
    return derive(secret, statement, b"ravan-flwr secure pair" + struct.pack("<QQ", low, high))


def own_key(seed: bytes, statement: bytes, partition: int, group: int) -> bytes:
    """Return the key of a client's own masks of a group, from its seed of that group."""
    info = b"ravan-flwr secure own" + struct.pack("<QQ", partition, group)
    return derive(seed, statement, info)
