"""Compute what both halves of a round agree on: what is signed, hashed, and told at the end."""

import hashlib
import struct
from collections.abc import Mapping, Sequence

import numpy as np

from ravan_flwr.secure import agreement
from ravan_flwr.secure.node_keys import SIGNATURE
from ravan_flwr.secure.schedule import Schedule, unpack

Parts = Mapping[str, bytes]  # what a message has, by name

MARK = 16  # bytes by which the server knows a share when it sees it
ENTRY = 2 * agreement.KEY + SIGNATURE  # of a client in the roll


def signed_keys(run: int, round_: int, partition: int, keys: bytes) -> bytes:
    """Write what a client signs of its keys of a round."""
    return b"ravan-flwr secure keys" + struct.pack("<QQQ", run, round_, partition) + keys


def statement_of(schedule: bytes, roll: bytes) -> bytes:
    """Hash all that the clients of a round must agree on."""
    length = struct.pack("<Q", len(schedule))
    return hashlib.sha256(b"ravan-flwr secure round" + length + schedule + roll).digest()


def signed_list(statement: bytes, here: bytes, alive: bytes) -> bytes:
    """Write what a client signs of who has sent numbers: who is not in it counts as dropped."""
    return b"ravan-flwr secure list" + statement + here + alive


def mark_of(statement: bytes, dealer: int, holder: int, index: int, share: bytes) -> bytes:
    """Hash a share, so that the server can tell it from a false one; it tells nothing of it."""
    place = struct.pack("<QQQ", dealer, holder, index)
    return hashlib.sha256(b"ravan-flwr secure mark" + statement + place + share).digest()[:MARK]


def seed_mark(statement: bytes, dealer: int, group: int, seed: bytes) -> bytes:
    """Hash a client's seed of a group, for the same purpose."""
    place = struct.pack("<QQ", dealer, group)
    return hashlib.sha256(b"ravan-flwr secure seed" + statement + place + seed).digest()[:MARK]


def sealing_key(secret: bytes, statement: bytes, dealer: int, holder: int) -> bytes:
    """Derive the key under which one client gives another its shares."""
    info = b"ravan-flwr secure shares" + struct.pack("<QQ", dealer, holder)
    return agreement.derive(secret, statement, info)


def wanted(schedule: Schedule, here: bytes, alive: bytes) -> list[tuple[int, Sequence[int]]]:
    """List whose shares are told, by place, and which of a bundle: 0 is of the pairs' key."""
    number = len(schedule.partitions)
    asked, sent = unpack(here, number), unpack(alive, number)
    opens = schedule.opened(asked, sent)
    found: list[tuple[int, Sequence[int]]] = []
    for place in map(int, np.flatnonzero(asked)):
        groups = enumerate(schedule.groups_of(place), start=1)
        indices = [index for index, group in groups if group in opens] if sent[place] else [0]
        found.append((place, indices))
    return found
