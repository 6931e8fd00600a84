"""Schedule which client trains which rows of a round, and mask and unmask these rows.

Every client checks the schedule. A row is a (layer, head) of RAVAN, or a whole tensor of the state.
A row with fewer trainers than the minimum is not trained: the sum of one client is its change.

Masks are made row by row. A client's own masks come from one seed for each *group* of rows, since a
group is unmasked whole or not at all. Rows that keep enough trainers even if as many clients fail
as the threshold allows are one group. Each set of trainers of other rows is a group of its own.
"""

import struct
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ravan_flwr.extras.secure import agreement, shamir
from ravan_flwr.extras.secure.agreement import ENTRY, MARK, SIGNATURE, keystream
from ravan_flwr.extras.secure.fixed_point import MASK, WIDTH, Numbers, from_bytes
from ravan_flwr.specs import MAX_MASKED_CLIENTS

MIN_TRAINERS = 3  # trainers of a row: each of two would know the other's change from the sum
MAX_ROWS = 2**20
MAX_NUMBERS = 2**33  # of one row
MAX_PARTS = 64
GIVEN = 64  # digits of the hash of settings and state

Bits = NDArray[np.bool_]


class Part(NamedTuple):
    """A tensor: its name, its number of masked rows, their size, and the bound of its changes."""

    name: str
    rows: Annotated[int, Field(ge=1, le=MAX_ROWS)]
    size: Annotated[int, Field(ge=1, le=MAX_NUMBERS)]
    bound: Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Schedule(BaseModel):
    """The schedule of a round, with the types and ranges that a client requires of it."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    run: Annotated[int, Field(ge=0, le=2**64)]
    round: Annotated[int, Field(ge=0, le=2**53)]
    minimum: Annotated[int, Field(ge=MIN_TRAINERS, le=MAX_MASKED_CLIENTS)]
    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=MAX_PARTS)]
    partitions: Annotated[  # the clients, ascending
        tuple[Annotated[int, Field(ge=0, le=2**53)], ...], Field(max_length=MAX_MASKED_CLIENTS)
    ]
    packed: tuple[str, ...]  # which rows each client trains, as `pack` has them, in hexadecimal
    given: Annotated[str, Field(max_length=GIVEN)] = ""  # hash of what all of them are given

    @cached_property
    def trained(self) -> Bits:
        """Return which client trains which row, (clients, rows), with all parts' rows in order."""
        rows = sum(part.rows for part in self.parts)
        return np.array([unpack(bytes.fromhex(row), rows) for row in self.packed])

    @property
    def threshold(self) -> int:
        """Return how many clients together can recover a secret: two thirds, rounded up."""
        return compute_threshold(len(self.partitions))

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each row."""
        return np.concatenate([np.full(part.rows, part.size, np.int64) for part in self.parts])

    @cached_property
    def row_ids(self) -> list[tuple[int, int]]:
        """Return (part, row within the part) of each row."""
        return [(at, row) for at, part in enumerate(self.parts) for row in range(part.rows)]

    @cached_property
    def row_groups(self) -> NDArray[np.int64]:
        """Return the group number of each row, from 0; -1 for rows that no client trains."""
        counts, numbers = self.trained.sum(0), dict[bytes, int]()
        safe = counts >= self.minimum + len(self.partitions) - self.threshold
        groups = []
        for row, trainers in enumerate(self.trained.T):
            key = b"" if safe[row] else pack(trainers)
            groups.append(numbers.setdefault(key, len(numbers)) if counts[row] else -1)
        return np.array(groups, np.int64)

    def spans(self) -> Iterator[tuple[Part, slice]]:
        """Yield each part with the slice of its rows."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.rows)
            start += part.rows

    def trained_groups(self, position: int) -> list[int]:
        """Return the groups of the rows that a client trains."""
        return [int(group) for group in np.unique(self.row_groups[self.trained[position]])]

    def masked(self, dealers: Bits) -> Bits:
        """Return the rows that each dealer masks: those with enough trainers among the dealers."""
        trained = self.trained & dealers[:, None]
        enough: Bits = trained & (trained.sum(0) >= self.minimum)
        return enough

    def opened(self, dealers: Bits, alive: Bits) -> set[int]:
        """Return the groups to unmask: enough trainers of each of their rows have sent numbers."""
        masked, groups = self.masked(dealers), self.row_groups
        left, rows = (masked & alive[:, None]).sum(0), masked.any(0)
        few = rows & (left < self.minimum)
        return set(groups[rows].tolist()) - set(groups[few].tolist())

    def requests(self, dealers: Bits, alive: Bits) -> list[tuple[int, Sequence[int]]]:
        """Return the requested shares: a dealer's position, and indices in its bundle.

        Index 0 is the share of the key of pairs, the others those of the seeds of its groups.
        """
        opens = self.opened(dealers, alive)
        requests: list[tuple[int, Sequence[int]]] = []
        for position in map(int, np.flatnonzero(dealers)):
            groups = enumerate(self.trained_groups(position), start=1)
            indices = [index for index, group in groups if group in opens]
            requests.append((position, indices if alive[position] else [0]))
        return requests

    def to_bytes(self) -> bytes:
        """Return the schedule as JSON; `read_schedule` is the inverse."""
        return self.model_dump_json().encode()


def compute_threshold(clients: int) -> int:
    """Return two thirds of so many clients, rounded up."""
    return -(-2 * clients // 3)


def make_schedule(
    run: int, round_: int, minimum: int, parts: Sequence[Part], rows: Mapping[int, Bits],
    given: str = "",
) -> Schedule:  # fmt: skip
    """Return the schedule of the rows that clients would train; ValueError for too few clients."""
    if not minimum <= len(rows) <= MAX_MASKED_CLIENTS:
        raise ValueError(
            f"got {len(rows)} clients that are ready, expected at least {minimum} "
            f"(secure-minimum) and at most {MAX_MASKED_CLIENTS}"
        )
    partitions = tuple(sorted(rows))
    trained = np.stack([rows[partition] for partition in partitions])
    trained = trained & (trained.sum(0) >= minimum)
    return Schedule(
        run=run, round=round_, minimum=minimum, parts=tuple(parts), partitions=partitions,
        packed=tuple(pack(row).hex() for row in trained), given=given,
    )  # fmt: skip


def read_schedule(data: bytes) -> Schedule:
    """Return a schedule from untrusted bytes; ValueError if it is not valid."""
    try:
        sent = Schedule.model_validate_json(data)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        location = ".".join(map(str, wrong["loc"]))
        raise ValueError(
            f"got a schedule of which {location or 'all'} is wrong: {wrong['msg']}"
        ) from None
    rows, number = sum(part.rows for part in sent.parts), len(sent.partitions)
    if rows > MAX_ROWS or len(sent.packed) != number:
        raise ValueError("got a schedule whose parts do not fit each other, expected one")
    if list(sent.partitions) != sorted(set(sent.partitions)):
        raise ValueError("got clients twice or out of order, expected each once")
    if number < sent.minimum:
        raise ValueError(f"got a round of {number} clients, expected {sent.minimum} at least")
    counts = sent.trained.sum(0)
    few = counts[(counts > 0) & (counts < sent.minimum)]
    if few.size:
        raise ValueError(
            f"got a part that {few[0]} clients train, expected {sent.minimum} at least or none"
        )
    return sent


def pack(bits: Bits) -> bytes:
    """Return bits as bytes, eight in a byte."""
    return np.packbits(bits).tobytes()


def unpack(data: bytes, number: int) -> Bits:
    """Return that many bits; ValueError if the data does not come from `pack`."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if len(data) != -(-number // 8) or bits[number:].any():
        raise ValueError(f"got {len(data)} bytes of a list, expected that of {number}")
    return bits[:number].astype(bool)


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Yield pieces of these sizes; ValueError unless they add up to the data."""
    if len(data) != sum(sizes):
        raise ValueError(f"got {len(data)} bytes, expected {sum(sizes)}")
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size


def max_protocol_bytes(schedule: Schedule) -> tuple[int, int]:
    """Return the most bytes that a client sends and receives beside its update and the state."""
    number, share = len(schedule.partitions), shamir.SHARE + MARK
    groups = [len(schedule.trained_groups(position)) for position in range(number)]
    bundles = [(1 + n) * share + agreement.TAG for n in groups]
    up = [number * (1 + n) * share + number * agreement.TAG + n * MARK for n in groups]
    fixed = ENTRY + agreement.KEY + SIGNATURE + shamir.SHARE * sum(groups)
    lists = 3 * -(-number // 8) + number * (ENTRY + SIGNATURE)  # with the key list
    down = len(schedule.to_bytes()) + lists + sum(bundles) - min(bundles)
    return max(up) + fixed, down


# Masks. Of two clients that train a row, the one with the lower partition adds a stream and the
# other subtracts it, so the streams cancel in the sum. Each client also adds a stream of its own.
# It protects numbers that arrive late, after their client counts as dropped and its key of pairs
# was revealed. A stream is ChaCha20 under a key for (statement of the round, pair) or (statement,
# client, group), with the row as nonce: no stream is used twice.

_BLOCK = 2**18  # numbers at a time


def make_stream(key: bytes, row_id: tuple[int, int], size: int) -> Numbers:
    """Return the masks of one row, given as (part, row): uniform numbers below 2^24."""
    stream, masks = keystream(key, struct.pack("<IQ", *row_id)), np.empty(size, np.uint32)
    for part in np.array_split(masks, -(-size // _BLOCK)):
        part[:] = from_bytes(stream(WIDTH * len(part)))
    return masks


class Vector:
    """The concatenated numbers of some rows, modulo 2^24."""

    def __init__(self, schedule: Schedule, rows: Bits, numbers: Numbers | None = None) -> None:
        self.schedule, self.rows = schedule, rows
        sizes = np.where(rows, schedule.sizes, 0)
        self.starts = np.concatenate([[0], np.cumsum(sizes)])
        length = int(self.starts[-1])
        self.numbers = np.zeros(length, np.uint32) if numbers is None else numbers
        if len(self.numbers) != length:
            raise ValueError(f"got {len(self.numbers)} numbers, expected {length}")

    def row(self, row: int) -> Numbers:
        """Return a view of a row's numbers."""
        return self.numbers[self.starts[row] : self.starts[row + 1]]

    def mask(self, key: bytes, rows: Bits, *, add: bool) -> None:
        """Add the streams of a key to these rows, or subtract them."""
        for row in np.flatnonzero(rows & self.rows):
            numbers = self.row(int(row))
            stream = make_stream(key, self.schedule.row_ids[int(row)], len(numbers))
            # Wrapping at 2^32 changes nothing modulo 2^24.
            (np.add if add else np.subtract)(numbers, stream, out=numbers)
            np.bitwise_and(numbers, MASK, out=numbers)

    def add(self, other: "Vector") -> None:
        """Add a vector that has some of these rows."""
        for row in np.flatnonzero(other.rows):
            numbers = self.row(int(row))
            np.add(numbers, other.row(int(row)), out=numbers)
            np.bitwise_and(numbers, MASK, out=numbers)
