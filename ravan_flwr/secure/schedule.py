"""Say who trains what in a round, as the server lists it and every client checks it.

What is trained are rows of the state's tensors: a (layer, head) of RAVAN, or a whole tensor. A row
with fewer trainers than the minimum is trained by nobody: the sum of one is that client's change.

Masks are made row by row. A client's own mask comes from one secret for each *group* of rows,
since a group is unmasked whole or not at all. Rows of which so many clients may fail as the
threshold allows and enough are still left are one group; every other set of trainers is another.

Where clients add noise, each sends every row, also those that it does not train: which rows it
trains is in its change alone, and the noise of a row is that of all.
"""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ravan_flwr.secure.fixed_point import MOST_CLIENTS
from ravan_flwr.secure.noised import NoiseShares

LEAST = 3  # trainers of a row: of two each would know the other's change from the sum
MOST_ROWS = 2**20
MOST_NUMBERS = 2**33  # of one row
MOST_PARTS = 64
GIVEN = 64  # digits of the hash of what all clients are given

Bits = NDArray[np.bool_]


@dataclass(frozen=True)
class Part:
    """Name one tensor, in how many rows of which size it is masked, and its changes' bound."""

    name: str
    rows: int
    size: int
    bound: float


@dataclass(frozen=True, eq=False)
class Schedule:
    """Hold the schedule of a round; `trained` is (clients, rows), rows of all parts in order."""

    run: int
    round: int
    minimum: int
    parts: tuple[Part, ...]
    partitions: tuple[int, ...]  # the clients, ascending
    trained: Bits
    given: str = ""  # hash of the settings and the state with which all of them train
    noise: NoiseShares | None = None  # of which each client adds a share

    @property
    def threshold(self) -> int:
        """Return how many clients together can tell a secret: two thirds, rounded up."""
        return threshold_of(len(self.partitions))

    @property
    def shown(self) -> float:
        """Return what the server sees of each client, as the sum of 1 / z^2; 0 without noise."""
        return self.noise.left(len(self.partitions), self.threshold) ** -2 if self.noise else 0.0

    @cached_property
    def sizes(self) -> NDArray[np.int64]:
        """Return the size of each row."""
        return np.concatenate([np.full(part.rows, part.size, np.int64) for part in self.parts])

    @cached_property
    def bounds(self) -> NDArray[np.float64]:
        """Return the bound of each row."""
        return np.concatenate([np.full(part.rows, part.bound) for part in self.parts])

    @cached_property
    def places(self) -> list[tuple[int, int]]:
        """Name each row: the number of its part, and its own within that."""
        return [(at, row) for at, part in enumerate(self.parts) for row in range(part.rows)]

    @cached_property
    def group_of(self) -> list[int]:
        """Number each row's group from 0; -1 of rows that nobody trains."""
        counts = self.trained.sum(0)
        may_fail = len(self.partitions) - self.threshold
        numbers: dict[bytes, int] = {}
        found = []
        for count, trainers in zip(counts, self.trained.T, strict=True):
            safe = count >= self.minimum + may_fail
            key = b"" if safe else np.packbits(trainers).tobytes()
            found.append(numbers.setdefault(key, len(numbers)) if count else -1)
        return found

    @cached_property
    def members(self) -> list[Bits]:
        """Tell for each group which clients train a row of it."""
        groups = np.array(self.group_of)
        found = np.zeros((int(groups.max(initial=-1)) + 1, len(self.partitions)), bool)
        for group, trainers in zip(groups, self.trained.T, strict=True):
            if group >= 0:
                found[group] |= trainers
        return list(found)

    def spans(self) -> Iterator[tuple[Part, slice]]:
        """Name each part, with where its rows are among all."""
        start = 0
        for part in self.parts:
            yield part, slice(start, start + part.rows)
            start += part.rows

    def groups_of(self, place: int) -> list[int]:
        """List the groups that a client is in."""
        return [group for group, members in enumerate(self.members) if members[place]]

    def masked(self, here: Bits) -> Bits:
        """Tell who masks which rows, of those who are here: too few of a row leave it out."""
        trained = self.trained & here[:, None]
        enough: Bits = trained & (trained.sum(0) >= self.minimum)
        return enough

    def opened(self, here: Bits, alive: Bits) -> set[int]:
        """List the groups that are unmasked: of each row enough trainers have sent numbers."""
        masked, groups = self.masked(here), np.array(self.group_of)
        left, asked = (masked & alive[:, None]).sum(0), masked.any(0)
        few = asked & (left < self.minimum)
        return set(groups[asked].tolist()) - set(groups[few].tolist())

    def to_bytes(self) -> bytes:
        """Write it; `read_schedule` is the inverse."""
        parts = [[part.name, part.rows, part.size, part.bound] for part in self.parts]
        noise = self.noise and [self.noise.norm, self.noise.multiplier, self.noise.bits]
        trained = [np.packbits(row).tobytes().hex() for row in self.trained]
        whole = {
            "run": self.run, "round": self.round, "minimum": self.minimum, "parts": parts,
            "partitions": list(self.partitions), "trained": trained, "given": self.given,
            "noise": noise,
        }  # fmt: skip
        return json.dumps(whole, separators=(",", ":")).encode()


def threshold_of(clients: int) -> int:
    """Return two thirds of so many clients, rounded up."""
    return -(-2 * clients // 3)


def make_schedule(
    run: int,
    round_: int,
    minimum: int,
    parts: Sequence[Part],
    wanted: Mapping[int, Bits],
    given: str = "",
    noise: NoiseShares | None = None,
) -> Schedule:
    """Make the schedule of what clients would train, by partition; ValueError for too few."""
    if not minimum <= len(wanted) <= MOST_CLIENTS:
        raise ValueError(
            f"got {len(wanted)} clients that are ready, expected at least {minimum} "
            f"(secure-minimum) and at most {MOST_CLIENTS}"
        )
    partitions = tuple(sorted(wanted))
    trained = np.stack([wanted[partition] for partition in partitions])
    trained = trained & (trained.sum(0) >= minimum)
    return Schedule(run, round_, minimum, tuple(parts), partitions, trained, given, noise)


def read_schedule(data: bytes) -> Schedule:
    """Read a schedule of unknown origin; ValueError if it is not one that may be followed."""
    try:
        schedule = _read(json.loads(data))
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(f"got a schedule that cannot be read ({error}), expected one") from None
    _check_cohort(schedule)
    counts = schedule.trained.sum(0)
    few = counts[(counts > 0) & (counts < schedule.minimum)]
    if few.size:
        raise ValueError(
            f"got a part that {int(few[0])} clients train, expected {schedule.minimum} at least or "
            "none"
        )
    if schedule.noise is not None and not schedule.trained.all():
        raise ValueError("got a part that some do not send, expected noise of all in each")
    return schedule


def _read(told: Any) -> Schedule:
    """Take the values, each in its type and range."""
    if not isinstance(told["parts"], list) or not 1 <= len(told["parts"]) <= MOST_PARTS:
        raise ValueError(f"got parts that are no list, expected 1 to {MOST_PARTS}")
    parts = tuple(_part(*values) for values in told["parts"])
    rows = sum(part.rows for part in parts)
    partitions = tuple(_whole(number, 0, 2**53) for number in told["partitions"])
    if rows > MOST_ROWS or len(told["trained"]) != len(partitions):
        raise ValueError("got a schedule whose parts do not fit to each other, expected one")
    trained = [unpack(bytes.fromhex(text), rows) for text in told["trained"]]
    return Schedule(
        run=_whole(told["run"], 0, 2**64),
        round=_whole(told["round"], 0, 2**53),
        minimum=_whole(told["minimum"], LEAST, MOST_CLIENTS),
        parts=parts,
        partitions=partitions,
        trained=np.array(trained, bool).reshape(len(partitions), rows),
        given=str(told["given"])[:GIVEN],
        noise=None if told["noise"] is None else _noise(*told["noise"]),
    )


def _check_cohort(schedule: Schedule) -> None:
    number = len(schedule.partitions)
    if list(schedule.partitions) != sorted(set(schedule.partitions)):
        raise ValueError("got clients twice or out of order, expected each once")
    if not schedule.minimum <= number <= MOST_CLIENTS:
        raise ValueError(
            f"got a round of {number} clients, expected {schedule.minimum} to {MOST_CLIENTS}"
        )


def _part(name: Any, rows: Any, size: Any, bound: Any) -> Part:
    if not isinstance(name, str) or not isinstance(bound, int | float) or isinstance(bound, bool):
        raise TypeError("a part's name or bound")
    if not 0 < bound < math.inf:
        raise ValueError(f"got the bound {bound} of {name}, expected a finite one above 0")
    return Part(name, _whole(rows, 1, MOST_ROWS), _whole(size, 1, MOST_NUMBERS), float(bound))


def _noise(norm: Any, multiplier: Any, bits: Any) -> NoiseShares:
    if any(type(value) not in (int, float) for value in (norm, multiplier, bits)):
        raise TypeError("a number of the noise")
    noise = NoiseShares(float(norm), float(multiplier), float(bits))
    noise.check()
    return noise


def _whole(value: Any, low: int, high: int) -> int:
    if type(value) is not int or not low <= value <= high:
        raise ValueError(f"got {str(value)[:40]} in a schedule, expected {low} to {high}")
    return value


def pack(bits: Bits) -> bytes:
    """Write bits, eight in a byte."""
    return np.packbits(bits).tobytes()


def unpack(data: bytes, number: int) -> Bits:
    """Read that many bits; ValueError if it is not what `pack` writes."""
    bits = np.unpackbits(np.frombuffer(data, np.uint8))
    if len(data) != -(-number // 8) or bits[number:].any():
        raise ValueError(f"got {len(data)} bytes of a list, expected that of {number}")
    return bits[:number].astype(bool)


def cut(data: bytes, sizes: Sequence[int]) -> Iterator[bytes]:
    """Cut bytes into pieces of these sizes; ValueError if they do not fit."""
    if len(data) != sum(sizes):
        raise ValueError(f"got {len(data)} bytes, expected {sum(sizes)}")
    at = 0
    for size in sizes:
        yield data[at : at + size]
        at += size
