"""The server's half of a secure round: forward messages, sum masked numbers, remove the masks.

Everything that a client sends is checked before it is used. A ValueError states what is wrong, and
rejects that client alone. docs/privacy.md lists the faults that no check can detect.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ravan_flwr.extras.secure import agreement, shamir
from ravan_flwr.extras.secure.agreement import ENTRY, KEY, MARK, SIGNATURE, Parts
from ravan_flwr.extras.secure.fixed_point import WIDTH, decode_mean, from_bytes
from ravan_flwr.extras.secure.node_keys import is_signed
from ravan_flwr.extras.secure.schedule import Bits, Schedule, Vector, cut, pack


@dataclass(frozen=True)
class KeyAnnouncement:
    """A client's public keys of the round with their signature, and the key that signs."""

    entry: bytes
    node: bytes

    @property
    def keys(self) -> list[bytes]:
        """Return the public keys for sealing and for pairs."""
        return list(cut(self.entry[:-SIGNATURE], [KEY] * 2))


@dataclass(frozen=True)
class SharesSent:
    """A client's sealed shares for all others, and their marks."""

    sealed: list[bytes]  # by holder
    marks: list[bytes]  # by holder, of the whole bundle
    seeds: list[bytes]  # marks of the client's seeds, by group


@dataclass(frozen=True)
class UnmaskedSum:
    """The result of a round: the mean change of each row, and over how many clients."""

    means: dict[str, NDArray[np.float64]]  # by part, (rows, size); zero where the count is zero
    counts: dict[str, NDArray[np.int64]]  # by part, (rows,)


class DealerError(ValueError):
    """The error of a client that has not shared its secrets correctly.

    With `deniers`, either that is so, or these clients falsely report that they got no share.
    """

    def __init__(self, partition: int, reason: str = "", deniers: Sequence[int] = ()) -> None:
        shared = f"partition {partition} has shared something else than its secrets"
        listed = ", ".join(map(str, deniers))
        super().__init__(
            f"{reason}; partitions that report no share: {listed}" if reason else shared
        )
        self.partition, self.deniers = partition, tuple(deniers)


def read_announcement(run: int, round_: int, partition: int, parts: Parts) -> KeyAnnouncement:
    """Return a client's announced keys; ValueError unless the named key has signed them.

    Keys because of which other clients would refuse the whole round are refused here.
    """
    entry, node = cut(parts["keys"] + parts["node"], [ENTRY, KEY])
    text = agreement.signed_keys(run, round_, partition, entry[:-SIGNATURE])
    if not is_signed(node, entry[-SIGNATURE:], text):
        raise ValueError("its keys of the round are not signed by the key that it names")
    announcement = KeyAnnouncement(entry, node)
    for key in announcement.keys:
        agreement.shared_secret(agreement.new_key(), key)  # refuses those of low order
    if len(set(announcement.keys)) < 2:
        raise ValueError("its two keys of the round are one, expected two")
    return announcement


class SecureServer:
    """The server of one secure round, from the schedule to the unmasked sum."""

    def __init__(self, schedule: Schedule, announcements: Mapping[int, KeyAnnouncement]) -> None:
        self.schedule, self.announcements = schedule, announcements
        self.data = schedule.to_bytes()
        self.key_list = b"".join(announcements[p].entry for p in schedule.partitions)
        self.statement = agreement.make_statement(self.data, self.key_list)
        self.shares_sent: dict[int, SharesSent] = {}  # by position in the schedule, as all below
        self.dealers: Bits = np.zeros(0, bool)
        self.alive: Bits = np.zeros(self.number, bool)
        self.signatures: dict[int, bytes] = {}
        self._masked: Bits = np.zeros_like(schedule.trained)
        self._total = Vector(schedule, self._masked[0])
        self._requests: list[tuple[int, Sequence[int]]] = []  # dealer, and indices of its shares
        self.denied: set[tuple[int, int]] = set()  # partitions (dealer, holder without its share)
        self._shares: dict[tuple[int, int], dict[int, bytes]] = {}  # by (dealer, index), by holder

    @property
    def number(self) -> int:
        """Return the number of clients in the schedule."""
        return len(self.schedule.partitions)

    def position(self, partition: int) -> int:
        """Return a client's position in the schedule."""
        return self.schedule.partitions.index(partition)

    # Phase 2: shares.

    def announce(self) -> dict[str, bytes]:
        """Return the message with schedule and key list, the same for all clients."""
        return {"schedule": self.data, "roll": self.key_list}

    def take_shares_sent(self, partition: int, parts: Parts) -> None:
        """Accept a client's shares for the others."""
        position = self.position(partition)
        groups = len(self.schedule.trained_groups(position))
        length = (1 + groups) * shamir.SHARE + agreement.TAG
        sealed = list(cut(parts["sealed"], [length] * self.number))
        marks = list(cut(parts["marks"], [(1 + groups) * MARK] * self.number))
        self.shares_sent[position] = SharesSent(
            sealed, marks, list(cut(parts["seeds"], [MARK] * groups))
        )

    # Phase 3: the masked numbers.

    def close_sharing(self) -> None:
        """Continue with the clients that have shared; ValueError if they are too few."""
        self.dealers = np.array([position in self.shares_sent for position in range(self.number)])
        self._check_enough(int(self.dealers.sum()), "have shared their secrets")
        self._masked = self.schedule.masked(self.dealers)
        self._total = Vector(self.schedule, np.any(self._masked, axis=0))

    def to_mask(self, partition: int) -> dict[str, bytes]:
        """Return a client's message: the clients that have shared, with their shares for it."""
        position = self.position(partition)
        bundles = [
            dealt for dealer, dealt in sorted(self.shares_sent.items()) if dealer != position
        ]
        return {
            "here": pack(self.dealers),
            "sealed": b"".join(dealt.sealed[position] for dealt in bundles),
            "marks": b"".join(dealt.marks[position] for dealt in bundles),
        }

    def trained_rows(self, partition: int) -> Bits:
        """Return the rows that a client trains."""
        return np.asarray(self._masked[self.position(partition)])

    def check_masked(self, partition: int, data: bytes) -> None:
        """Raise ValueError unless a client's masked numbers are as many as it trains."""
        expected = WIDTH * int(self.schedule.sizes[self.trained_rows(partition)].sum())
        if len(data) != expected:
            raise ValueError(f"got {len(data)} bytes of masked numbers, expected {expected}")

    def take_masked(self, partition: int, data: bytes) -> None:
        """Add a client's masked numbers, which `check_masked` has accepted, to the sum."""
        position = self.position(partition)
        self._total.add(Vector(self.schedule, self._masked[position], from_bytes(data)))
        self.alive[position] = True

    # Phase 4: agree on who has sent numbers.

    def close_masked(self) -> dict[str, bytes]:
        """Return the list of clients that have sent numbers; ValueError if they are too few."""
        self._check_enough(int(self.alive.sum()), "have sent their numbers")
        return {"alive": pack(self.alive)}

    def take_signature(self, partition: int, parts: Parts) -> None:
        """Accept a client's signature of that list; ValueError if it is not valid."""
        (signature,) = cut(parts["signature"], [SIGNATURE])
        text = agreement.signed_list(self.statement, pack(self.dealers), pack(self.alive))
        if not is_signed(self.announcements[partition].node, signature, text):
            raise ValueError("its signature is not of the list of clients that have sent numbers")
        self.signatures[self.position(partition)] = signature

    # Phase 5: unmask.

    def close_list(self) -> dict[str, bytes]:
        """Return the message with all signatures; ValueError if they are too few."""
        self._check_enough(len(self.signatures), "have signed the list of clients")
        signers = np.array([position in self.signatures for position in range(self.number)])
        signatures = b"".join(self.signatures[position] for position in sorted(self.signatures))
        self._requests = self.schedule.requests(self.dealers, self.alive)
        return {"signers": pack(signers), "signatures": signatures}

    def take_shares(self, partition: int, parts: Parts) -> None:
        """Accept a client's shares; ValueError, and none counts, if one differs from its mark."""
        holder, entries, denied = self.position(partition), [], set()
        number = sum(len(indices) for _, indices in self._requests)
        shares = cut(parts["shares"], [shamir.SHARE] * number)
        for dealer, indices in self._requests:
            for index in indices:
                share = next(shares)
                if share == shamir.NO_SHARE:  # the dealer's bundle differed from its marks
                    if dealer != holder:
                        denied.add((self.schedule.partitions[dealer], partition))
                    continue
                marks = self.shares_sent[dealer].marks[holder][MARK * index : MARK * (index + 1)]
                args = self.schedule.partitions[dealer], partition, [share], index
                if agreement.mark_shares(self.statement, *args) != marks:
                    raise ValueError(
                        f"its share of partition {self.schedule.partitions[dealer]} is not the one "
                        "that it was given"
                    )
                entries.append((dealer, index, share))
        self.denied |= denied
        for dealer, index, share in entries:
            self._shares.setdefault((dealer, index), {})[holder] = share

    # The sum.

    def open(self) -> UnmaskedSum:
        """Return the unmasked sum; ValueError, which names the client, if that is not possible."""
        for position, indices in self._requests:
            if self.alive[position]:
                for index in indices:
                    self._take_off_own(position, index)
            else:
                self._take_off_pairs(position)
        counts = (self._masked & self.alive[:, None]).sum(0)
        opened = self.schedule.opened(self.dealers, self.alive)
        counts[~np.isin(self.schedule.row_groups, list(opened))] = 0
        result = UnmaskedSum({}, {})
        for part, rows in self.schedule.spans():
            result.counts[part.name] = counts[rows]
            result.means[part.name] = mean = np.zeros((part.rows, part.size))
            for row in np.flatnonzero(counts[rows]):
                total = self._total.row(rows.start + row)
                mean[row] = decode_mean(total, int(counts[rows][row]), part.bound)
        return result

    def _take_off_own(self, position: int, index: int) -> None:
        """Subtract a client's own masks of a group of rows."""
        partition = self.schedule.partitions[position]
        group = self.schedule.trained_groups(position)[index - 1]
        seed = self._join_shares(position, index)
        if (
            agreement.mark_seed(self.statement, partition, group, seed)
            != self.shares_sent[position].seeds[index - 1]
        ):
            raise DealerError(partition)
        rows = self._masked[position] & (self.schedule.row_groups == group)
        self._total.mask(agreement.own_key(seed, self.statement, partition, group), rows, add=False)

    def _take_off_pairs(self, position: int) -> None:
        """Remove the pair masks that others have added for a client that sent no numbers."""
        dropped = self.schedule.partitions[position]
        private = self._join_shares(position, 0)
        if agreement.derive_public_key(private) != self.announcements[dropped].keys[1]:
            raise DealerError(dropped)
        for at in np.flatnonzero(self.alive):
            rows, peer = self._masked[at] & self._masked[position], self.schedule.partitions[at]
            if rows.any():
                secret = agreement.shared_secret(private, self.announcements[peer].keys[1])
                key = agreement.pair_key(secret, self.statement, peer, dropped)
                self._total.mask(key, rows, add=peer > dropped)

    def _join_shares(self, dealer: int, index: int) -> bytes:
        shares = self._shares.get((dealer, index), {})
        try:
            return shamir.join(shares, self.schedule.threshold)
        except ValueError as error:
            partition, threshold = self.schedule.partitions[dealer], self.schedule.threshold
            deniers = [
                p
                for position, p in enumerate(self.schedule.partitions)
                if position not in shares and (partition, p) in self.denied
            ]
            # Enough shares match their marks but form no secret. Or more than a third of the
            # clients report no share: more than the protocol assumes to collude.
            if len(shares) >= threshold or len(deniers) > self.number - threshold:
                raise DealerError(partition) from None
            reason = f"the masks of partition {partition} cannot be recovered: {error}"
            if len(shares) + len(deniers) >= threshold:  # enough, had they not been denied
                raise DealerError(partition, reason, deniers) from None
            raise ValueError(reason) from None

    def _check_enough(self, number: int, action: str) -> None:
        if number < self.schedule.threshold:
            raise ValueError(
                f"{number} of {self.number} clients {action}, expected at least "
                f"{self.schedule.threshold}, two thirds"
            )
