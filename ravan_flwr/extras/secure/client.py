"""The client's half of a secure round, phase by phase.

Between phases a client keeps a *state* of plain values and bytes, with the secrets of one round. It
answers each phase once and in order: a phase that is repeated, out of order or of another round is
refused. So a client masks once, signs one list and sends one set of shares. It deletes its secrets
before it sends shares.
"""

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from ravan_flwr.extras.secure import agreement, shamir
from ravan_flwr.extras.secure.agreement import ENTRY, KEY, MARK, SIGNATURE, TAG, Parts
from ravan_flwr.extras.secure.fixed_point import Numbers, to_bytes
from ravan_flwr.extras.secure.node_keys import NodeKeys
from ravan_flwr.extras.secure.schedule import Bits, Schedule, Vector, cut, read_schedule, unpack

State = dict[str, Any]


class DistrustError(ValueError):
    """The error of a client that cannot verify other clients' keys of a round."""

    def __init__(self, partitions: Sequence[int], reason: str) -> None:
        super().__init__(reason)
        self.partitions = tuple(partitions)


class SecureClient:
    """A client in a secure round; its phases change `state`, which is kept between them."""

    def __init__(self, state: State, run: int, partition: int, keys: NodeKeys) -> None:
        self.state, self.run, self.partition, self.keys = state, run, partition, keys

    # Phase 1: keys.

    def make_keys(self, round_: int) -> dict[str, bytes]:
        """Return new public keys for a round, signed, and the key that signs."""
        last = self.state.get("round", 0)
        if round_ <= last:
            raise ValueError(
                f"asked for the keys of round {round_}, expected one after {last}: this client "
                "has begun that one, and takes part in a round once"
            )
        sealing, pairs = agreement.new_key(), agreement.new_key()
        self.state.clear()
        self.state |= {
            "round": round_, "phase": "keys", "sealing": sealing, "pairs": pairs,
        }  # fmt: skip
        public = agreement.derive_public_key(sealing) + agreement.derive_public_key(pairs)
        signature = self.keys.sign(agreement.signed_keys(self.run, round_, self.partition, public))
        return {"keys": public + signature, "node": self.keys.public()}

    # Phase 2: shares.

    def share_secrets(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Check schedule and key list; return sealed shares of this client's secrets for all."""
        self._enter_phase(round_, "keys", "shares")
        data, key_list = message["schedule"], message["roll"]
        schedule, statement = read_schedule(data), agreement.make_statement(data, key_list)
        if (schedule.run, schedule.round) != (self.run, round_):
            raise ValueError(
                f"got a schedule of run {schedule.run}, round {schedule.round}, expected {self.run}"
                f", {round_}"
            )
        if self.partition not in schedule.partitions:
            raise ValueError(f"got a schedule without partition {self.partition}, expected it")
        self._check_key_list(schedule, key_list)
        position, number = schedule.partitions.index(self.partition), len(schedule.partitions)
        seeds = {
            group: secrets.token_bytes(shamir.SECRET) for group in schedule.trained_groups(position)
        }
        dealt = [
            shamir.split(secret, schedule.threshold, number)
            for secret in (self.state["pairs"], *seeds.values())
        ]
        bundles = [[shares[holder] for shares in dealt] for holder in range(number)]
        holdings = [b"".join(bundles[position]) if at == position else b"" for at in range(number)]
        self.state |= {
            "schedule": data, "roll": key_list, "held": holdings,
            "groups": list(seeds), "seeds": list(seeds.values()),
        }  # fmt: skip
        sealed, marks = b"", b""
        for holder, bundle in zip(schedule.partitions, bundles, strict=True):
            text = b"".join(bundle)
            if holder == self.partition:  # a client keeps its own shares
                sealed += bytes(len(text) + TAG)
            else:
                key = self._sealing_key(schedule, statement, self.partition, holder)
                sealed += agreement.seal(key, text, statement)
            marks += agreement.mark_shares(statement, self.partition, holder, bundle)
        hashes = [agreement.mark_seed(statement, self.partition, g, s) for g, s in seeds.items()]
        return {"sealed": sealed, "marks": marks, "seeds": b"".join(hashes)}

    def _check_key_list(self, schedule: Schedule, key_list: bytes) -> None:
        """Raise an error unless all keys are signed and unique, and this client's are unchanged.

        DistrustError for signatures that are not valid, ValueError otherwise.
        """
        own_keys = [
            agreement.derive_public_key(self.state[purpose]) for purpose in ("sealing", "pairs")
        ]
        keys: set[bytes] = set()
        distrusted: dict[int, str] = {}
        entries = cut(key_list, [ENTRY] * len(schedule.partitions))
        for partition, entry in zip(schedule.partitions, entries, strict=True):
            public, signature = entry[:-SIGNATURE], entry[-SIGNATURE:]
            text = agreement.signed_keys(self.run, schedule.round, partition, public)
            try:
                self.keys.check(partition, signature, text)
            except ValueError as error:
                distrusted[partition] = str(error)
            keys |= {public[:KEY], public[KEY:]}
            if partition == self.partition and public != b"".join(own_keys):
                raise ValueError("got other keys of this client, expected those that it made")
        if distrusted:
            raise DistrustError(list(distrusted), next(iter(distrusted.values())))
        if len(keys) != 2 * len(schedule.partitions):
            raise ValueError("got one key of two clients, expected each to have its own")

    def _secret_with(self, schedule: Schedule, peer: int, purpose: str) -> bytes:
        """Return the secret shared with another client, by the keys for sealing or for pairs."""
        at = ENTRY * schedule.partitions.index(peer) + (KEY if purpose == "pairs" else 0)
        public = self.state["roll"][at : at + KEY]
        return agreement.shared_secret(self.state[purpose], public)

    def _sealing_key(self, schedule: Schedule, statement: bytes, dealer: int, holder: int) -> bytes:
        peer = holder if dealer == self.partition else dealer
        secret = self._secret_with(schedule, peer, "sealing")
        return agreement.sealing_key(secret, statement, dealer, holder)

    # Phase 3: the masked numbers.

    def take_shares(self, round_: int, message: Parts) -> tuple[Schedule, Bits]:
        """Keep the other clients' shares; return the schedule and the rows of this client."""
        self._enter_phase(round_, "shares", "training")
        schedule, statement = self._schedule()
        dealers = unpack(message["here"], len(schedule.partitions))
        position = schedule.partitions.index(self.partition)
        if not dealers[position] or dealers.sum() < schedule.threshold:
            raise ValueError(
                f"got a list of {dealers.sum()} clients, expected {schedule.threshold} at least, "
                "and this one among them"
            )
        positions = [int(at) for at in np.flatnonzero(dealers) if at != position]
        # A client shares its key of pairs, and the seed of each of its groups.
        numbers = [1 + len(schedule.trained_groups(at)) for at in positions]
        sealed = cut(message["sealed"], [n * shamir.SHARE + TAG for n in numbers])
        marks = cut(message["marks"], [n * MARK for n in numbers])
        for at, text, mark in zip(positions, sealed, marks, strict=True):
            dealer = schedule.partitions[at]
            key = self._sealing_key(schedule, statement, dealer, self.partition)
            try:
                bundle = agreement.open_sealed(key, text, statement)
            except ValueError:
                bundle = b""
            shares = list(cut(bundle, [shamir.SHARE] * (len(bundle) // shamir.SHARE)))
            # A bundle that differs from its marks counts as missing: others may have valid ones.
            is_marked = agreement.mark_shares(statement, dealer, self.partition, shares) == mark
            self.state["held"][at] = bundle if is_marked else b""
        self.state["here"] = message["here"]
        return schedule, schedule.masked(dealers)[position]

    def mask(self, round_: int, numbers: Numbers) -> bytes:
        """Return the masked changes of this client's rows, as bytes, and delete its secrets."""
        self._enter_phase(round_, "training", "masked")
        schedule, statement = self._schedule()
        dealers = unpack(self.state["here"], len(schedule.partitions))
        masked, position = schedule.masked(dealers), schedule.partitions.index(self.partition)
        vector = Vector(schedule, masked[position], numbers)
        for group, seed in zip(self.state["groups"], self.state["seeds"], strict=True):
            key = agreement.own_key(seed, statement, self.partition, group)
            vector.mask(key, schedule.row_groups == group, add=True)
        for at in np.flatnonzero(dealers):
            if at != position and (masked[at] & masked[position]).any():
                peer = schedule.partitions[at]
                secret = self._secret_with(schedule, peer, "pairs")
                key = agreement.pair_key(secret, statement, self.partition, peer)
                vector.mask(key, masked[at], add=self.partition < peer)
        for used in ("sealing", "pairs", "seeds"):
            del self.state[used]
        return to_bytes(vector.numbers)

    # Phase 4: agree on who has sent numbers.

    def agree(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Return this client's signature of the list of clients that have sent numbers."""
        self._enter_phase(round_, "masked", "agreed")
        schedule, statement = self._schedule()
        dealers, number = self.state["here"], len(schedule.partitions)
        sent = unpack(message["alive"], number)
        if (sent & ~unpack(dealers, number)).any():
            raise ValueError("got clients that have shared nothing, expected those that have")
        if sent.sum() < schedule.threshold:
            raise ValueError(
                f"got a list of {sent.sum()} clients, expected {schedule.threshold} at least"
            )
        if not sent[schedule.partitions.index(self.partition)]:
            raise ValueError("got a list without this client, which has sent its numbers")
        self.state["alive"] = message["alive"]
        signed = agreement.signed_list(statement, dealers, message["alive"])
        return {"signature": self.keys.sign(signed)}

    # Phase 5: unmask.

    def unmask(self, round_: int, message: Parts) -> dict[str, bytes]:
        """Return shares, once: of dropped clients' keys of pairs, of all others' mask seeds.

        Never both for one client: a threshold of clients has signed which clients sent numbers.
        """
        self._enter_phase(round_, "agreed", "done")
        schedule, statement = self._schedule()
        state, number = dict(self.state), len(schedule.partitions)
        self.state.clear()
        self.state |= {"round": round_, "phase": "done"}
        lists = state["here"], state["alive"]
        dealers, alive = (unpack(bits, number) for bits in lists)
        signers = unpack(message["signers"], number) & alive
        if signers.sum() < schedule.threshold:
            raise ValueError(
                f"got {signers.sum()} signatures, expected {schedule.threshold} at least"
            )
        signatures = cut(message["signatures"], [SIGNATURE] * int(signers.sum()))
        text = agreement.signed_list(statement, *lists)
        for position, signature in zip(np.flatnonzero(signers), signatures, strict=True):
            self.keys.check(schedule.partitions[position], signature, text)
        shares, size = b"", shamir.SHARE
        for at, indices in schedule.requests(dealers, alive):
            for index in indices:  # NO_SHARE stands for a missing share
                shares += state["held"][at][size * index : size * (index + 1)] or shamir.NO_SHARE
        return {"shares": shares}

    # All phases.

    def _enter_phase(self, round_: int, before: str, after: str) -> None:
        """Enter a phase; ValueError unless it is the next one of this round."""
        step = self.state.get("round", 0), self.state.get("phase", "none")
        if step != (round_, before):
            raise ValueError(
                f"asked to continue in round {round_} after phase {before!r}, but this client is "
                f"in round {step[0]} after {step[1]!r}; it answers each phase once, and forgets "
                "a round when it is started again"
            )
        self.state["phase"] = after

    def _schedule(self) -> tuple[Schedule, bytes]:
        data = self.state["schedule"]
        return read_schedule(data), agreement.make_statement(data, self.state["roll"])
