"""Mask the updates of a round (`secure-aggregation=true`): the server sees sums, and no update.

Five times clients are asked: for fresh keys, for shares of their secrets, for what they trained,
masked, for their signature of who has sent that, and for the shares by which the sum is unmasked.
Who fails in a phase is left out of those that follow. With fewer than two thirds of the clients, or
with masks that cannot be taken off, the round has no effect, says why, and the run continues.

With `privacy=client` as well clients add noise in shares. Of n clients each clips its own change
and adds 1/n of the noise (the variance), so that the server sees no sum without at least two thirds
of it. It adds what is missing: whoever drops out, what is released has the noise of a private
round, neither more nor less. docs/privacy.md has the proof.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import compress
from logging import getLogger
from typing import cast

import numpy as np
import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.records import DISTRUSTS, PIECES, SEEN, to_pieces
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.privacy.mechanism import adapted, gaussian, moved_by
from ravan_flwr.runs.record import Masked as MaskedRecord
from ravan_flwr.secure.agreement import Parts
from ravan_flwr.secure.fixed_point import ROOM, NoiseShares
from ravan_flwr.secure.schedule import Bits, Part, Schedule, make_schedule
from ravan_flwr.secure.server import (
    DealerError,
    KeyAnnouncement,
    SecureServer,
    UnmaskedSum,
    read_announcement,
)
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import outgoing
from ravan_flwr.server.kind import Kind
from ravan_flwr.server.noised import Noised
from ravan_flwr.server.replies import Update, as_value_error, read_masked, read_phase
from ravan_flwr.server.round import Round
from ravan_flwr.training.masked import (
    CUT_OFF,
    WITHIN,
    by_tensor,
    check_cohort,
    given_to_all,
    least_cohort,
    moved,
    noised_parts,
    parts_of,
    rows_wanted,
)

log = getLogger(__name__)

SKIPPED_ROUNDS = 64  # of a client with which they would have no effect
OFTEN = 1e-3  # share of numbers that are cut off, above which a round says so


class Masked(Kind):
    """Ask the phases of a masked round; what is trained is read as a sum alone."""

    message_type = "train.masked"
    enough = math.inf  # all replies are waited for: no number of them is enough
    asks_more = False  # the masks belong to the clients that were drawn

    def __init__(self, round_: Round) -> None:
        super().__init__(round_)
        round_.least = 0  # a round that has too few is without effect, and the run continues
        self.told: MaskedRecord = {"clients": 0}
        self._accused: Counter[int] = Counter()  # by partition
        self._needed = self.run.config.min_replies  # good replies of a phase
        self.numbers = NUMBERS[self.run.config.privacy](self)

    @staticmethod
    def cohort(config: Config, partitions: int) -> int:
        return max(config.min_replies, least_cohort(config, partitions))

    def quorum(self, asked: int) -> int:
        """Give stragglers their grace from as many replies on as the phase needs."""
        return min(asked, self._needed)

    # Before training: keys and shares.

    def prepare(self, cohort: list[RegisteredClient]) -> list[RegisteredClient]:
        """Return those of a cohort that have shared their secrets."""
        if self.round.without_effect:
            return []
        try:
            asked = self._share_secrets(cohort)
        except ValueError as error:
            self.round.without_effect = str(error)
            return []
        partitions = [member.partition_id for member in asked]
        self.spend(partitions, self.secure.schedule.shown)
        return asked

    def _share_secrets(self, drawn: Sequence[RegisteredClient]) -> list[RegisteredClient]:
        announcements: dict[int, KeyAnnouncement] = {}
        run = self.round.grid.run.run_id

        def announce_key(partition: int, parts: Parts) -> None:
            announcement = read_announcement(run, self.round.number, partition, parts)
            if any(set(announcement.keys) & set(other.keys) for other in announcements.values()):
                raise ValueError("its keys of the round are another client's")
            announcements[partition] = announcement

        self._ask("keys", drawn, {}, ("keys", "node"), announce_key)
        ready = [member for member in drawn if member.partition_id in announcements]
        secure = self.secure = SecureServer(self._schedule(ready), announcements)
        threshold = secure.schedule.threshold
        self.told = {"clients": len(ready), "threshold": threshold}
        self._needed = max(threshold, self._needed)
        names = ("sealed", "marks", "seeds")
        self._ask("shares", ready, secure.announce(), names, secure.take_dealt)
        for member in ready:
            votes = self._accused[member.partition_id]
            if votes > len(ready) - threshold:
                self._skip(member.partition_id)
                log.warning(
                    "partition %d is skipped: %d of %d clients do not know its key",
                    member.partition_id, votes, len(ready),
                )  # fmt: skip
        secure.close_dealing()
        return [member for member in ready if secure.here[secure.place(member.partition_id)]]

    def _schedule(self, members: Sequence[RegisteredClient]) -> Schedule:
        """Say who trains what, in sums of how many, and with how much noise."""
        return make_schedule(
            self.round.grid.run.run_id, self.round.number, self.run.config.secure_minimum,
            *self.numbers.schedule(members), self._given(), self.numbers.shares,
        )  # fmt: skip

    def wanted(self, member: RegisteredClient) -> Bits:
        """Tell which rows a client would train."""
        seed, number = self.run.config.seed, self.round.number
        random = generator(seed, "heads", number, member.partition_id)
        return rows_wanted(self.round.method, self.run.state.tensors, member.share, random)

    def _given(self) -> str:
        """Hash what all clients are given: none is sent another state for its budget."""
        sent = outgoing(self.round.method, self.run.state.tensors, 1.0)
        return given_to_all(self.run.config, sent)

    def _skip(self, partition: int) -> None:
        """Skip a client for many rounds: with it they would have no effect either."""
        for member in self.run.registry.members.values():
            if member.partition_id == partition:
                node = self.run.registry.nodes[member.node_id]
                node.asleep[MessageType.TRAIN] = self.round.number + SKIPPED_ROUNDS

    # Training.

    def address(self, message: Message, member: RegisteredClient) -> Message:
        """Add what a client needs to mask: who is here, and their shares for it."""
        message.content[PIECES] = to_pieces(self.secure.to_mask(member.partition_id))
        return message

    def check(self, message: Message, member: RegisteredClient) -> Update:
        data, seconds = read_masked(message, member, self.round.number, self.run.state.derived)
        steps = self.run.steps(member)
        return Update(member, {}, None, seconds, masked=data, bytes_up=len(data), steps=steps)

    def add(self, update: Update) -> list[list[int]]:
        self.secure.take_masked(update.member.partition_id, update.masked)
        return sums_changes(self.round.method).heads_of(self.numbers.rows_of(update.member))

    # After training: agreement, and unmasking.

    def mean(self) -> Tensors:
        """Unmask the sum and return what it makes; ValueError with the reason if that cannot be."""
        self.round.round_log.secure = self.told
        if self.round.without_effect:
            raise ValueError(self.round.without_effect)
        try:
            return self.numbers.state_of(self._unmask())
        except DealerError as error:
            blamed = self._blamed(error)
            for partition in blamed:
                self._skip(partition)
            told = ", ".join(f"partition {partition}" for partition in blamed)
            raise ValueError(f"{error}; skipped from now on: {told}") from error

    def _blamed(self, error: DealerError) -> list[int]:
        """Return which clients are skipped: of two in dispute the one with more disputes, or both.

        One of the two is at fault, and which it is cannot be known. Disputes are counted over all
        rounds that were lost to them.
        """
        if not error.deniers:
            return [error.partition]
        nodes = self.run.registry.nodes.values()
        disputes = {n.member.partition_id: n.disputes for n in nodes if n.member is not None}
        for one, other in self.secure.denied:
            disputes[one].add(other)
            disputes[other].add(one)
        found = set()
        for pair in ((error.partition, denier) for denier in error.deniers):
            most = max(len(disputes[one]) for one in pair)
            found |= {one for one in pair if len(disputes[one]) == most}
        return sorted(found)

    def _unmask(self) -> UnmaskedSum:
        secure, round_log = self.secure, self.round.round_log
        partitions = [client["partition-id"] for client in round_log.clients]
        sent, least = secure.close_masked(), self.run.config.min_replies
        if len(partitions) < least:
            raise ValueError(round_log.why_too_few_came(least))
        self._needed = secure.schedule.threshold
        alive = [m for m in self.run.registry.members.values() if m.partition_id in partitions]
        self._ask("agree", alive, sent, ("signature",), secure.take_signature)
        agreed = [m for m in alive if secure.place(m.partition_id) in secure.signatures]
        self._ask("unmask", agreed, secure.close_list(), ("shares",), secure.take_shares)
        dropped = secure.here & ~secure.alive
        opened = secure.open()
        self.told["dropped"] = list(compress(secure.schedule.partitions, dropped))
        return opened

    # All phases.

    def _ask(
        self,
        kind: str,
        members: Sequence[RegisteredClient],
        parts: Parts,
        names: Sequence[str],
        take: Callable[[int, Parts], None],
    ) -> None:
        """Ask clients the same, and take what each answers; what is no good costs its client."""
        number, pieces, messages = self.round.number, to_pieces(parts), []
        for member in members:
            more = self.numbers.settings(member) if kind == "keys" else {}
            settings = ConfigRecord({"round": number, **more})
            content = RecordDict({PIECES: pieces, "config": settings})
            messages.append(Message(content, member.node_id, f"train.{kind}", group_id=str(number)))

        def check(message: Message, member: RegisteredClient) -> None:
            found = read_phase(message, number, names)
            if DISTRUSTS in found:
                if kind == "shares":  # one vote of each client
                    self._accused.update(_partitions(found[DISTRUSTS]))
                raise ValueError("it does not know the keys of others, and takes no part")
            take(member.partition_id, found)

        replies = self.round.send(messages)
        self.round.collector.take(replies, check, lambda _: None)


class MaskedNoised(Masked, Noised):
    """Draw clients and account as a private round does; what they send is masked, and noised."""


class Rounded:
    """Sum up changes, rounded to whole numbers within bounds."""

    shares: NoiseShares | None = None  # of the noise that clients add

    def __init__(self, masked: Masked) -> None:
        self.masked, self.round, self.run = masked, masked.round, masked.run

    def schedule(
        self, members: Sequence[RegisteredClient]
    ) -> tuple[Sequence[Part], Mapping[int, Bits]]:
        """Say who trains what: as each would have chosen, less what too few have chosen."""
        config, state = self.run.config, self.run.state.tensors
        check_cohort(config, len(members), self.run.registry.partitions)
        wanted = {member.partition_id: self.masked.wanted(member) for member in members}
        steps = config.learning_rate * max(map(self.run.steps, members), default=0)
        return parts_of(self.round.method, state, steps), wanted

    def settings(self, member: RegisteredClient) -> dict[str, float]:  # noqa: ARG002
        """Return what a client is told when it is asked for its keys."""
        return {}

    def rows_of(self, member: RegisteredClient) -> Tensors:
        """Tell which rows of each tensor a client has trained."""
        secure = self.masked.secure
        return by_tensor(secure.schedule.parts, secure.rows_of(member.partition_id))

    def state_of(self, opened: UnmaskedSum) -> Tensors:
        """Return the state that the mean changes make."""
        untrained = sum(int((counts == 0).sum()) for counts in opened.counts.values())
        cut_off = float(opened.means[CUT_OFF].max(initial=0.0))
        self.masked.told |= {"untrained": untrained, "cut-off": max(0.0, round(cut_off, 6))}
        if cut_off > OFTEN:
            log.warning(
                "round %d: %.2g %% of the numbers were beyond their bounds and cut off; lower "
                "learning-rate", self.round.number, 100 * cut_off,
            )  # fmt: skip
        means, method = opened.means, sums_changes(self.round.method)
        counts, clients = opened.counts, int(self.masked.secure.alive.sum())
        if method.mean_over_cohort:  # those too that did not train a row
            means = {n: mean * (counts[n] / clients)[:, None] for n, mean in means.items()}
        return method.counted(moved(self.run.state.tensors, means), clients)


class NoisedSum(Rounded):
    """Sum up clipped changes, to which each client adds its share of the noise."""

    def __init__(self, masked: Masked) -> None:
        super().__init__(masked)
        self.release = cast(Noised, masked)
        self.noise, self.norm = self.release.noise, self.release.norm
        bits = self.noise.of_bits if self.noise.adaptive else 0.0
        self.shares: NoiseShares = NoiseShares(self.norm, self.noise.of_changes, bits)

    def schedule(
        self, members: Sequence[RegisteredClient]
    ) -> tuple[Sequence[Part], Mapping[int, Bits]]:
        """List all rows for all: noise goes to whatever anybody could have trained."""
        parts = noised_parts(self.round.method, self.run.state.tensors, self.shares)
        rows = np.ones(sum(part.rows for part in parts), bool)
        return parts, {member.partition_id: rows for member in members}

    def settings(self, member: RegisteredClient) -> dict[str, float]:
        """Tell a client first what was seen of it: it may have lost its account."""
        return {SEEN: self.release.account.seen.get(member.partition_id, 0.0)}

    def rows_of(self, member: RegisteredClient) -> Tensors:
        parts = parts_of(self.round.method, self.run.state.tensors, 1.0)
        return by_tensor(parts, self.masked.wanted(member))

    def state_of(self, opened: UnmaskedSum) -> Tensors:
        """Return the state that the noised sums make, with the rest of the noise."""
        noise, secure, state = self.noise, self.masked.secure, self.run.state.tensors
        missing = math.sqrt(1 - int(secure.alive.sum()) / secure.number)  # of the deviation
        deviation = missing * noise.of_changes * self.norm
        sums = {
            name: torch.from_numpy(opened.means[name]).view_as(old) + gaussian(old.shape, deviation)
            for name, old in state.items()
        }
        # What clipped changes and noise cannot have made is refused. This looks at what is
        # released: a check of sums with less noise would tell more.
        norm = math.hypot(*(float(tensor.norm()) for tensor in sums.values()))
        numbers = sum(tensor.numel() for tensor in sums.values())
        most = self.norm * (secure.number + noise.of_changes * (math.sqrt(numbers) + ROOM))
        if norm > most:
            raise ValueError(
                f"the noised sum has a norm of {norm:.3g}, expected {most:.3g} at most: a client "
                "sent what is not masked or clipped as agreed"
            )
        if noise.adaptive:
            # Each client's bit is a half or less a half; their sum has all of its noise.
            scale = noise.of_bits / (noise.of_changes * self.norm)
            rest = float(gaussian([1], missing * noise.of_bits))
            bits = float(opened.means[WITHIN][0, 0]) * scale + rest
            self.release.next_norm = adapted(self.norm, bits, noise.clients)
        expected = self.release.expected
        return {name: moved_by(old, sums[name], expected[name]) for name, old in state.items()}


NUMBERS = {"none": Rounded, "client": NoisedSum}  # by `privacy`


def _partitions(data: bytes) -> set[int]:
    """Read whom a client accuses; ValueError if that is no list of partitions."""
    with as_value_error():
        named = json.loads(data)
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise ValueError("its list of clients cannot be read, expected partitions")
    return set(named)
