"""Hold a client's half of a secure round, phase by phase.

What a client knows between phases is its *state*, plain values that JSON can hold. It has the
secrets of one round, and goes on by one phase at a time: whoever asks for a phase again, for
another round, or out of order, is refused. So a client masks once, signs one list and tells one set
of shares, and forgets its secrets before it tells them.
"""

import secrets
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from ravan_flwr.secure import agreement, shamir
from ravan_flwr.secure.fixed_point import Numbers, to_bytes
from ravan_flwr.secure.masks import Vector, own_key, pair_key
from ravan_flwr.secure.node_keys import SIGNATURE
from ravan_flwr.secure.schedule import Bits, Schedule, cut, read_schedule, unpack
from ravan_flwr.secure.transcript import (
    ENTRY,
    MARK,
    Parts,
    mark_of,
    sealing_key,
    seed_mark,
    signed_keys,
    signed_list,
    statement_of,
    wanted,
)

State = dict[str, Any]


class Keys(Protocol):
    """Sign as this client, and check others' signatures (node_keys.py)."""

    def public(self) -> bytes:
        """Return this client's public key."""

    def sign(self, text: bytes) -> bytes:
        """Sign a text."""

    def check(self, partition: int, signature: bytes, text: bytes) -> None:
        """Raise ValueError unless that client has signed the text."""


class DistrustError(ValueError):
    """Tell that some clients' keys of a round are not theirs, as far as this one knows."""

    def __init__(self, partitions: Sequence[int], why: str) -> None:
        super().__init__(why)
        self.partitions = tuple(partitions)


class SecureClient:
    """Answer the phases of a round in order; `state` is changed and kept between them."""

    def __init__(self, state: State, run: int, partition: int, keys: Keys) -> None:
        self.state, self.run, self.partition, self.keys = state, run, partition, keys

    # Phase 1: keys.

    def make_keys(self, round_: int) -> dict[str, bytes]:
        """Make fresh keys for a round, and sign them."""
        last = self.state.get("round", 0)
        if round_ <= last:
            raise ValueError(
                f"asked for the keys of round {round_}, expected one after {last}: this client "
                "has begun that one, and takes part in a round once"
            )
        sealing, pairs = agreement.new_key(), agreement.new_key()
        self.state.clear()
        self.state |= {
            "round": round_, "phase": "keys", "sealing": sealing.hex(), "pairs": pairs.hex(),
        }  # fmt: skip
        public = agreement.public_of(sealing) + agreement.public_of(pairs)
        signature = self.keys.sign(signed_keys(self.run, round_, self.partition, public))
        return {"keys": public + signature, "node": self.keys.public()}

    # Phase 2: shares.

    def deal(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Check schedule and roll, then share this client's secrets among all in it."""
        self._go_on(round_, "keys", "shares")
        data, roll = message["schedule"], message["roll"]
        schedule, statement = read_schedule(data), statement_of(data, roll)
        self._check_schedule(schedule, round_)
        self._check_roll(schedule, roll)
        place = schedule.partitions.index(self.partition)
        seeds = {group: secrets.token_bytes(shamir.SECRET) for group in schedule.groups_of(place)}
        number = len(schedule.partitions)
        dealt = [
            shamir.split(secret, schedule.threshold, number)
            for secret in (bytes.fromhex(self.state["pairs"]), *seeds.values())
        ]
        bundles = [[shares[holder] for shares in dealt] for holder in range(number)]
        self.state |= {
            "schedule": data.decode(), "roll": roll.hex(),
            "seeds": {str(group): seed.hex() for group, seed in seeds.items()},
            "held": {str(self.partition): b"".join(bundles[place]).hex()},
        }  # fmt: skip
        sealed, marks = [], []
        for holder, bundle in zip(schedule.partitions, bundles, strict=True):
            sealed.append(self._seal(schedule, statement, holder, b"".join(bundle)))
            marks += [
                mark_of(statement, self.partition, holder, index, share)
                for index, share in enumerate(bundle)
            ]
        told = [seed_mark(statement, self.partition, group, s) for group, s in seeds.items()]
        return {"sealed": b"".join(sealed), "marks": b"".join(marks), "seeds": b"".join(told)}

    def _check_schedule(self, schedule: Schedule, round_: int) -> None:
        if (schedule.run, schedule.round) != (self.run, round_):
            raise ValueError(
                f"got a schedule of run {schedule.run}, round {schedule.round}, expected {self.run}"
                f", {round_}"
            )
        if self.partition not in schedule.partitions:
            raise ValueError(f"got a schedule without partition {self.partition}, expected it")

    def _check_roll(self, schedule: Schedule, roll: bytes) -> None:
        """Check that each client has signed its keys, and that this one's are what it made."""
        seen: set[bytes] = set()
        distrusted: dict[int, str] = {}
        entries = cut(roll, [ENTRY] * len(schedule.partitions))
        for partition, entry in zip(schedule.partitions, entries, strict=True):
            public, signature = entry[:-SIGNATURE], entry[-SIGNATURE:]
            text = signed_keys(self.run, schedule.round, partition, public)
            try:
                self.keys.check(partition, signature, text)
            except ValueError as error:
                distrusted[partition] = str(error)
            seen |= {public[: agreement.KEY], public[agreement.KEY :]}
            if partition == self.partition and public != self._public():
                raise ValueError("got other keys of this client, expected those that it made")
        if distrusted:
            raise DistrustError(list(distrusted), next(iter(distrusted.values())))
        if len(seen) != 2 * len(schedule.partitions):
            raise ValueError("got one key of two clients, expected each to have its own")

    def _public(self) -> bytes:
        private = (bytes.fromhex(self.state[name]) for name in ("sealing", "pairs"))
        return b"".join(map(agreement.public_of, private))

    def _seal(self, schedule: Schedule, statement: bytes, holder: int, text: bytes) -> bytes:
        if holder == self.partition:  # its own it keeps
            return bytes(len(text) + agreement.TAG)
        secret = self._secret_with(schedule, holder, "sealing")
        key = sealing_key(secret, statement, self.partition, holder)
        return agreement.seal(key, text, statement)

    def _secret_with(self, schedule: Schedule, other: int, kind: str) -> bytes:
        """Compute the secret shared with another client, by the keys for sealing or for pairs."""
        at = ENTRY * schedule.partitions.index(other) + (agreement.KEY if kind == "pairs" else 0)
        public = bytes.fromhex(self.state["roll"])[at : at + agreement.KEY]
        return agreement.shared_secret(bytes.fromhex(self.state[kind]), public)

    # Phase 3: the masked numbers.

    def take_shares(self, round_: int, message: Parts) -> tuple[Schedule, Bits]:
        """Keep the others' shares; return the schedule, and the rows that this client trains."""
        self._go_on(round_, "shares", "training")
        schedule, statement = self._schedule()
        here = unpack(message["here"], len(schedule.partitions))
        place = schedule.partitions.index(self.partition)
        if not here[place] or here.sum() < schedule.threshold:
            raise ValueError(
                f"got a list of {here.sum()} clients, expected {schedule.threshold} at least, and "
                "this one among them"
            )
        dealers = [schedule.partitions[at] for at in np.flatnonzero(here) if at != place]
        numbers = [_bundle(schedule, dealer) for dealer in dealers]
        sealed = cut(message["sealed"], [n * shamir.SHARE + agreement.TAG for n in numbers])
        marks = cut(message["marks"], [n * MARK for n in numbers])
        held = self.state["held"]
        for dealer, text, mark in zip(dealers, sealed, marks, strict=True):
            bundle = self._opened(schedule, statement, dealer, text, mark)
            held[str(dealer)] = "" if bundle is None else bundle.hex()
        self.state["here"] = message["here"].hex()
        return schedule, schedule.masked(here)[place]

    def _opened(
        self, schedule: Schedule, statement: bytes, dealer: int, sealed: bytes, marks: bytes
    ) -> bytes | None:
        """Open a bundle of shares; None for one that is not as marked: others may have theirs."""
        secret = self._secret_with(schedule, dealer, "sealing")
        key = sealing_key(secret, statement, dealer, self.partition)
        try:
            bundle = agreement.open_sealed(key, sealed, statement)
        except ValueError:
            return None
        shares = cut(bundle, [shamir.SHARE] * (len(bundle) // shamir.SHARE))
        mine = (mark_of(statement, dealer, self.partition, i, s) for i, s in enumerate(shares))
        return bundle if b"".join(mine) == marks else None

    def mask(self, round_: int, numbers: Numbers) -> bytes:
        """Mask what was trained, row after row."""
        self._go_on(round_, "training", "masked")
        schedule, statement = self._schedule()
        here = unpack(bytes.fromhex(self.state["here"]), len(schedule.partitions))
        masked, place = schedule.masked(here), schedule.partitions.index(self.partition)
        vector = Vector(schedule, masked[place], numbers)
        groups = np.array(schedule.group_of)
        for group, seed in self.state["seeds"].items():
            key = own_key(bytes.fromhex(seed), statement, self.partition, int(group))
            vector.mask(key, groups == int(group), add=True)
        for at in np.flatnonzero(here):
            if at != place and (masked[at] & masked[place]).any():
                other = schedule.partitions[at]
                secret = self._secret_with(schedule, other, "pairs")
                key = pair_key(secret, statement, self.partition, other)
                vector.mask(key, masked[at], add=self.partition < other)
        for used in ("sealing", "pairs", "seeds"):
            del self.state[used]
        return to_bytes(vector.numbers)

    # Phase 4: agree on who has sent numbers.

    def agree(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Sign the list of those whose numbers the server has."""
        self._go_on(round_, "masked", "agreed")
        schedule, statement = self._schedule()
        here = bytes.fromhex(self.state["here"])
        self._check_list(schedule, here, message["alive"])
        self.state["alive"] = message["alive"].hex()
        return {"signature": self.keys.sign(signed_list(statement, here, message["alive"]))}

    def _check_list(self, schedule: Schedule, here: bytes, alive: bytes) -> None:
        number = len(schedule.partitions)
        sent, asked = unpack(alive, number), unpack(here, number)
        if (sent & ~asked).any():
            raise ValueError("got clients that have shared nothing, expected those that have")
        if sent.sum() < schedule.threshold:
            raise ValueError(
                f"got a list of {sent.sum()} clients, expected {schedule.threshold} at least"
            )
        if not sent[schedule.partitions.index(self.partition)]:
            raise ValueError("got a list without this client, which has sent its numbers")

    # Phase 5: unmask.

    def unmask(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Tell shares, once: of the dropped their key of pairs, of the others their own masks.

        Never both of one client: who has sent numbers is what a threshold of clients has signed.
        """
        self._go_on(round_, "agreed", "done")
        schedule, statement = self._schedule()
        state = dict(self.state)
        self.state.clear()
        self.state |= {"round": round_, "phase": "done"}
        here, alive = (bytes.fromhex(state[name]) for name in ("here", "alive"))
        self._check_signatures(schedule, signed_list(statement, here, alive), alive, message)
        told = [
            _told(bytes.fromhex(state["held"].get(str(schedule.partitions[place]), "")), indices)
            for place, indices in wanted(schedule, here, alive)
        ]
        return {"shares": b"".join(told)}

    def _check_signatures(
        self, schedule: Schedule, text: bytes, alive: bytes, message: Parts
    ) -> None:
        """Check that a threshold of those who sent numbers have signed the same list."""
        number = len(schedule.partitions)
        signers = unpack(message["signers"], number) & unpack(alive, number)
        if signers.sum() < schedule.threshold:
            raise ValueError(
                f"got {signers.sum()} signatures, expected {schedule.threshold} at least"
            )
        signatures = cut(message["signatures"], [SIGNATURE] * int(signers.sum()))
        for place, signature in zip(np.flatnonzero(signers), signatures, strict=True):
            self.keys.check(schedule.partitions[place], signature, text)

    # All phases.

    def _go_on(self, round_: int, before: str, after: str) -> None:
        """Enter a phase, once and in order."""
        found = self.state.get("round", 0), self.state.get("phase", "none")
        if found != (round_, before):
            raise ValueError(
                f"asked to go on in round {round_} after phase {before!r}, but this client is in "
                f"round {found[0]} after {found[1]!r}; it answers each phase once, and forgets a "
                "round when it is started again"
            )
        self.state["phase"] = after

    def _schedule(self) -> tuple[Schedule, bytes]:
        data = self.state["schedule"].encode()
        return read_schedule(data), statement_of(data, bytes.fromhex(self.state["roll"]))


def _bundle(schedule: Schedule, dealer: int) -> int:
    """Count the shares that a client gives each: of its key of pairs, and of each group's seed."""
    return 1 + len(schedule.groups_of(schedule.partitions.index(dealer)))


def _told(bundle: bytes, indices: Sequence[int]) -> bytes:
    """Take some shares of a bundle; where there is none, say so."""
    size = shamir.SHARE
    taken = [bundle[size * index : size * (index + 1)] for index in indices]
    return b"".join(share or shamir.NONE for share in taken)
