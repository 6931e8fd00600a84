"""Hold the server's half of a secure round: pass on, sum up masked numbers, take masks off.

Whatever a client sends is checked here before it is used; ValueError says what is wrong with it,
and costs that client alone. docs/secure-aggregation.md says what cannot be told from honest
numbers.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ravan_flwr.secure import agreement, shamir
from ravan_flwr.secure.agreement import ENTRY, KEY, MARK, SIGNATURE, Parts
from ravan_flwr.secure.fixed_point import WIDTH, from_bytes, mean_of
from ravan_flwr.secure.node_keys import is_signed
from ravan_flwr.secure.schedule import Bits, Schedule, Vector, cut, pack


@dataclass(frozen=True)
class KeyAnnouncement:
    """Hold what a client says first: its keys of the round, signed, and who signs."""

    entry: bytes
    node: bytes

    @property
    def keys(self) -> list[bytes]:
        """Return the public keys for sealing and of its pairs."""
        return list(cut(self.entry[:-SIGNATURE], [KEY] * 2))


@dataclass(frozen=True)
class SharesSent:
    """Hold a client's shares for all others, and the marks of them."""

    sealed: list[bytes]  # by holder
    marks: list[bytes]  # by holder, of its whole bundle
    seeds: list[bytes]  # marks of its seeds, by group


@dataclass(frozen=True)
class UnmaskedSum:
    """Hold what came of a round: for each row the mean change, and of how many clients."""

    means: dict[str, NDArray[np.float64]]  # by part, (rows, size); zero where no client counts
    counts: dict[str, NDArray[np.int64]]  # by part, (rows,)


class DealerError(ValueError):
    """Tell that a client has not shared its secrets with the others as it should have.

    Where there are `deniers`, either it has not, or they falsely report that it gave them no share.
    """

    def __init__(self, partition: int, why: str = "", deniers: Sequence[int] = ()) -> None:
        shared = f"partition {partition} has shared something else than its secrets"
        listed = ", ".join(map(str, deniers))
        super().__init__(f"{why}; partitions that report no share: {listed}" if why else shared)
        self.partition, self.deniers = partition, tuple(deniers)


def read_announcement(run: int, round_: int, partition: int, parts: Parts) -> KeyAnnouncement:
    """Read a client's keys; ValueError unless they are signed by the key that it names.

    Keys with which the others would refuse the whole round are refused here.
    """
    entry, node = _of_length(parts, "keys", ENTRY), _of_length(parts, "node", KEY)
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
    """Lead a round of these clients, from their schedule to the sum."""

    def __init__(self, schedule: Schedule, announcements: Mapping[int, KeyAnnouncement]) -> None:
        self.schedule, self.announcements = schedule, announcements
        self.data = schedule.to_bytes()
        self.roll = b"".join(announcements[p].entry for p in schedule.partitions)
        self.statement = agreement.statement_of(self.data, self.roll)
        self.dealt: dict[int, SharesSent] = {}  # by place, as all below
        self.dealers: Bits = np.zeros(0, bool)
        self.alive: Bits = np.zeros(self.number, bool)
        self.signatures: dict[int, bytes] = {}
        self._masked: Bits = np.zeros_like(schedule.trained)
        self._total = Vector(schedule, self._masked[0])
        self._requests: list[tuple[int, Sequence[int]]] = []  # whose shares, and which
        self.denied: set[tuple[int, int]] = set()  # partitions: who gave nothing, says who
        self._shares: dict[tuple[int, int], dict[int, bytes]] = {}  # by dealer, index: by holder

    @property
    def number(self) -> int:
        """Count the clients of the schedule."""
        return len(self.schedule.partitions)

    def place(self, partition: int) -> int:
        """Find a client's place in the schedule."""
        return self.schedule.partitions.index(partition)

    # Phase 2: shares.

    def announce(self) -> dict[str, bytes]:
        """Tell schedule and roll, to all the same."""
        return {"schedule": self.data, "roll": self.roll}

    def take_dealt(self, partition: int, parts: Parts) -> None:
        """Take a client's shares for the others."""
        place = self.place(partition)
        groups = len(self.schedule.groups_of(place))
        length = (1 + groups) * shamir.SHARE + agreement.TAG
        sealed = list(cut(parts["sealed"], [length] * self.number))
        marks = list(cut(parts["marks"], [(1 + groups) * MARK] * self.number))
        self.dealt[place] = SharesSent(sealed, marks, list(cut(parts["seeds"], [MARK] * groups)))

    # Phase 3: the masked numbers.

    def close_dealing(self) -> None:
        """Go on with those who have shared; ValueError if they are too few."""
        self.dealers = np.array([place in self.dealt for place in range(self.number)])
        self._check_enough(int(self.dealers.sum()), "have shared their secrets")
        self._masked = self.schedule.masked(self.dealers)
        self._total = Vector(self.schedule, np.any(self._masked, axis=0))

    def to_mask(self, partition: int) -> dict[str, bytes]:
        """Tell a client who is here, with the shares that they have for it."""
        place = self.place(partition)
        bundles = [dealt for dealer, dealt in sorted(self.dealt.items()) if dealer != place]
        return {
            "here": pack(self.dealers),
            "sealed": b"".join(dealt.sealed[place] for dealt in bundles),
            "marks": b"".join(dealt.marks[place] for dealt in bundles),
        }

    def rows_of(self, partition: int) -> Bits:
        """Tell which rows a client trains."""
        return np.asarray(self._masked[self.place(partition)])

    def take_masked(self, partition: int, data: bytes) -> None:
        """Add a client's masked numbers to the sum."""
        place = self.place(partition)
        expected = WIDTH * int(self.schedule.sizes[self._masked[place]].sum())
        if len(data) != expected:
            raise ValueError(f"got {len(data)} bytes of masked numbers, expected {expected}")
        self._total.add(Vector(self.schedule, self._masked[place], from_bytes(data)))
        self.alive[place] = True

    # Phase 4: agree on who has sent numbers.

    def close_masked(self) -> dict[str, bytes]:
        """Tell who has sent numbers; ValueError if they are too few."""
        self._check_enough(int(self.alive.sum()), "have sent their numbers")
        return {"alive": pack(self.alive)}

    def take_signature(self, partition: int, parts: Parts) -> None:
        """Take a client's signature of that list."""
        signature = _of_length(parts, "signature", SIGNATURE)
        text = agreement.signed_list(self.statement, pack(self.dealers), pack(self.alive))
        if not is_signed(self.announcements[partition].node, signature, text):
            raise ValueError("its signature is not of the list of those who have sent numbers")
        self.signatures[self.place(partition)] = signature

    # Phase 5: unmask.

    def close_list(self) -> dict[str, bytes]:
        """Tell the signatures; ValueError if they are too few."""
        self._check_enough(len(self.signatures), "have signed who is there")
        signers = np.array([place in self.signatures for place in range(self.number)])
        signatures = b"".join(self.signatures[place] for place in sorted(self.signatures))
        self._requests = self.schedule.requests(self.dealers, self.alive)
        return {"signers": pack(signers), "signatures": signatures}

    def take_shares(self, partition: int, parts: Parts) -> None:
        """Take the shares that a client tells; one that is not as marked refuses them all."""
        holder, entries, denied = self.place(partition), [], set()
        number = sum(len(indices) for _, indices in self._requests)
        shares = cut(parts["shares"], [shamir.SHARE] * number)
        for dealer, indices in self._requests:
            for index in indices:
                share = next(shares)
                if share == shamir.NONE:  # what the dealer gave it was not as marked
                    if dealer != holder:
                        denied.add((self.schedule.partitions[dealer], partition))
                    continue
                marks = self.dealt[dealer].marks[holder][MARK * index : MARK * (index + 1)]
                args = self.schedule.partitions[dealer], partition, [share], index
                if agreement.marks_of(self.statement, *args) != marks:
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
        """Take off all masks that are left; ValueError, which says who, if that cannot be."""
        for place, indices in self._requests:
            if self.alive[place]:
                for index in indices:
                    self._take_off_own(place, index)
            else:
                self._take_off_pairs(place)
        counts = (self._masked & self.alive[:, None]).sum(0)
        opened = self.schedule.opened(self.dealers, self.alive)
        counts[~np.isin(self.schedule.group_of, list(opened))] = 0
        result = UnmaskedSum({}, {})
        for part, rows in self.schedule.spans():
            result.counts[part.name] = counts[rows]
            result.means[part.name] = mean = np.zeros((part.rows, part.size))
            for row in np.flatnonzero(counts[rows]):
                total = self._total.row(rows.start + row)
                mean[row] = mean_of(total, int(counts[rows][row]), part.bound)
        return result

    def _take_off_own(self, place: int, index: int) -> None:
        """Take off a client's own masks of a group of rows."""
        partition = self.schedule.partitions[place]
        group = self.schedule.groups_of(place)[index - 1]
        seed = self._joined(place, index)
        if (
            agreement.seed_mark(self.statement, partition, group, seed)
            != self.dealt[place].seeds[index - 1]
        ):
            raise DealerError(partition)
        rows = self._masked[place] & (self.schedule.group_of == group)
        self._total.mask(agreement.own_key(seed, self.statement, partition, group), rows, add=False)

    def _take_off_pairs(self, place: int) -> None:
        """Take off the masks that others have added for a client that sent no numbers."""
        dropped = self.schedule.partitions[place]
        private = self._joined(place, 0)
        if agreement.public_of(private) != self.announcements[dropped].keys[1]:
            raise DealerError(dropped)
        for at in np.flatnonzero(self.alive):
            rows, peer = self._masked[at] & self._masked[place], self.schedule.partitions[at]
            if rows.any():
                secret = agreement.shared_secret(private, self.announcements[peer].keys[1])
                key = agreement.pair_key(secret, self.statement, peer, dropped)
                self._total.mask(key, rows, add=peer > dropped)

    def _joined(self, dealer: int, index: int) -> bytes:
        shares = self._shares.get((dealer, index), {})
        try:
            return shamir.join(shares, self.schedule.threshold)
        except ValueError as error:
            partition, threshold = self.schedule.partitions[dealer], self.schedule.threshold
            deniers = [
                p
                for place, p in enumerate(self.schedule.partitions)
                if place not in shares and (partition, p) in self.denied
            ]
            # There are enough, each as its dealer marked it, and they are of no secret. Or more
            # than a third say that they were given none: more than may work together.
            if len(shares) >= threshold or len(deniers) > self.number - threshold:
                raise DealerError(partition) from None
            why = f"the masks of partition {partition} cannot be told: {error}"
            if len(shares) + len(deniers) >= threshold:  # without the denials there were enough
                raise DealerError(partition, why, deniers) from None
            raise ValueError(why) from None

    def _check_enough(self, number: int, what: str) -> None:
        if number < self.schedule.threshold:
            raise ValueError(
                f"{number} of {self.number} clients {what}, expected at least "
                f"{self.schedule.threshold}, two thirds"
            )


def _of_length(parts: Parts, name: str, length: int) -> bytes:
    if len(parts[name]) != length:
        raise ValueError(f"{name} has {len(parts[name])} bytes, expected {length}")
    return parts[name]
