"""Mask the rows that a client trains, and take masks off again.

Of two clients that train a row, the one with the lower partition adds a stream and the other takes
it away, so that they cancel in the sum. On top of that each client adds a stream of its own, which
protects numbers that arrive after their client was given up and its key of pairs was told.

A stream is ChaCha20 under a key for (statement of the round, pair) or (statement, client, group),
with the row as nonce: no stream is used twice.
"""

import struct

import numpy as np

from ravan_flwr.secure.agreement import keystream
from ravan_flwr.secure.fixed_point import MASK, WIDTH, Numbers, from_bytes
from ravan_flwr.secure.schedule import Bits, Schedule

_BLOCK = 2**18  # numbers at a time


def stream_of(key: bytes, place: tuple[int, int], size: int) -> Numbers:
    """Make the masks of one row, by (part, row): uniform numbers below 2^24."""
    more, found = keystream(key, struct.pack("<IQ", *place)), np.empty(size, np.uint32)
    for part in np.array_split(found, -(-size // _BLOCK)):
        part[:] = from_bytes(more(WIDTH * len(part)))
    return found


class Vector:
    """Hold the numbers of some rows, one after the other, modulo 2^24."""

    def __init__(self, schedule: Schedule, rows: Bits, numbers: Numbers | None = None) -> None:
        self.schedule, self.rows = schedule, rows
        sizes = np.where(rows, schedule.sizes, 0)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        length = int(self.starts[-1])
        self.numbers = np.zeros(length, np.uint32) if numbers is None else numbers
        if len(self.numbers) != length:
            raise ValueError(f"got {len(self.numbers)} numbers, expected {length}")

    def row(self, row: int) -> Numbers:
        """View the numbers of a row."""
        return self.numbers[self.starts[row] : self.starts[row + 1]]

    def mask(self, key: bytes, rows: Bits, *, add: bool) -> None:
        """Add the streams of a key to these rows, or take them away."""
        for row in np.flatnonzero(rows & self.rows):
            numbers = self.row(int(row))
            stream = stream_of(key, self.schedule.places[int(row)], len(numbers))
            # Wrapping at 2^32 changes nothing modulo 2^24.
            (np.add if add else np.subtract)(numbers, stream, out=numbers)
            np.bitwise_and(numbers, MASK, out=numbers)

    def add(self, other: "Vector") -> None:
        """Add the rows of a vector that has some of these."""
        for row in np.flatnonzero(other.rows):
            numbers = self.row(int(row))
            np.add(numbers, other.row(int(row)), out=numbers)
            np.bitwise_and(numbers, MASK, out=numbers)
