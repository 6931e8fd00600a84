"""Hold a round of `secure-aggregation=true`: the server sees sums over clients, and no upload.

Five times clients are asked: for fresh keys, for shares of their secrets, for what they trained,
masked, for their signature of who has sent that, and for the shares by which the sum is unmasked.
Who fails in a phase is left out of those that follow. With fewer than two thirds of the clients, or
with masks that cannot be taken off, the round has no effect, says why, and the next one goes on.
"""

import json
import math
from collections import Counter
from collections.abc import Callable, Sequence
from logging import getLogger

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid
from numpy.typing import NDArray

from ravan_flwr.messages.pieces import DISTRUSTS, PIECES, to_pieces
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.runs.record import Masked
from ravan_flwr.secure.schedule import Bits, Schedule, make_schedule, threshold_of
from ravan_flwr.secure.server import (
    DealerError,
    KeyAnnouncement,
    SecureServer,
    UnmaskedSum,
    read_greeting,
)
from ravan_flwr.secure.transcript import Parts
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import outgoing
from ravan_flwr.server.replies import Reply, Trained, read_masked, read_phase, telling
from ravan_flwr.server.round import Run, TrainingRound
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.training.masked import (
    CUT_OFF,
    by_tensor,
    check_cohort,
    given_to_all,
    moved,
    parts_of,
    rows_wanted,
)

log = getLogger(__name__)

OFTEN = 1e-3  # share of numbers that are cut off, above which a round says so


class SecureRound(TrainingRound):
    """Hold a training round in which uploads are masked."""

    kind = "train.masked"

    def __init__(self, number: int, run: Run) -> None:
        super().__init__(number, run)
        self.least = 0  # a round that has too few is without effect, and the run goes on
        self.why = ""  # it has no effect
        self.told: Masked = {"clients": 0}
        self._accused: Counter[int] = Counter()  # by partition
        self._needed = run.config.min_replies  # good replies of a phase

    # Before training: keys and shares.

    def choose(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        """Sample clients as in any round; return those that have shared their secrets."""
        self.grid = grid
        drawn = self._drawn(sampler, grid)
        if self.why:
            return []
        try:
            return self._prepare(drawn)
        except ValueError as error:
            self.why = str(error)
            return []

    def _drawn(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        return sampler.sample(grid, self.round_log)

    def _prepare(self, drawn: Sequence[RegisteredClient]) -> list[RegisteredClient]:
        greetings: dict[int, KeyAnnouncement] = {}
        run = self.grid.run.run_id

        def greet(partition: int, parts: Parts) -> None:
            greeting = read_greeting(run, self.number, partition, parts)
            if any(set(greeting.keys) & set(other.keys) for other in greetings.values()):
                raise ValueError("its keys of the round are another client's")
            greetings[partition] = greeting

        self._ask("keys", drawn, {}, ("keys", "node"), greet)
        ready = [member for member in drawn if member.partition_id in greetings]
        self.secure = SecureServer(self._schedule(ready), greetings)
        threshold = self.secure.schedule.threshold
        self.told = {"clients": len(ready), "threshold": threshold}
        self._needed = max(threshold, self._needed)
        names = ("sealed", "marks", "seeds")
        self._ask("shares", ready, self.secure.announce(), names, self.secure.take_dealt)
        self._leave_out_accused(ready)
        self.secure.close_dealing()
        return [member for member in ready if self.secure.here[self._place(member)]]

    def _schedule(self, members: Sequence[RegisteredClient]) -> Schedule:
        """Say who trains what: as each would have chosen, less what too few have chosen."""
        config, state = self.run.config, self.run.state.tensors
        check_cohort(config, len(members), self.run.registry.partitions)
        wanted = {member.partition_id: self._wanted(member) for member in members}
        steps = config.learning_rate * max(map(self.steps, members), default=0)
        parts = parts_of(self.method, state, steps)
        run = self.grid.run.run_id
        return make_schedule(run, self.number, config.secure_minimum, parts, wanted, self._given())

    def _wanted(self, member: RegisteredClient) -> Bits:
        """Tell which rows a client would train."""
        random = generator(self.run.config.seed, "heads", self.number, member.partition_id)
        return rows_wanted(self.method, self.run.state.tensors, member.share, random)

    def _given(self) -> str:
        """Hash what all clients are given: none is sent another state for its budget."""
        sent = outgoing(self.method, self.run.state.tensors, 1.0)
        return given_to_all(self.run.config, sent)

    def _leave_out_accused(self, members: Sequence[RegisteredClient]) -> None:
        """Let a client rest whose keys more than a third of the others say are not its own."""
        for member in members:
            votes = self._accused[member.partition_id]
            if votes > len(members) - threshold_of(len(members)):
                self._leave_out(member.partition_id)
                log.warning(
                    "partition %d rests: %d of %d clients do not know its key",
                    member.partition_id, votes, len(members),
                )  # fmt: skip

    def _leave_out(self, partition: int) -> None:
        """Let a client rest: with it, the rounds to come would have no effect either."""
        for member in self.run.registry.members.values():
            if member.partition_id == partition:
                self.run.registry.nodes[member.node_id].rest(MessageType.TRAIN, self.number)

    # Training.

    def addressed(self, message: Message, member: RegisteredClient) -> Message:
        """Add what a client needs to mask: who is here, and their shares for it."""
        message.content[PIECES] = to_pieces(self.secure.to_mask(member.partition_id))
        return message

    def _take_trained(self, message: Message, member: RegisteredClient, bytes_down: int) -> None:
        derived = self.run.state.derived
        data, seconds = read_masked(message, member, self.number, derived)
        self.secure.take_masked(member.partition_id, data)
        reply = Reply(member, Trained({}, None, seconds), len(data), bytes_down, self.steps(member))
        self.round_log.use(reply, heads=self._heads_of(member))

    def _heads_of(self, member: RegisteredClient) -> list[list[int]]:
        """List the heads that a client trained, by layer."""
        rows = by_tensor(self.secure.schedule, self.secure.rows_of(member.partition_id))
        return sums_changes(self.method).heads_of(rows)

    def quorum(self, asked: int) -> int:
        """Give stragglers their grace from as many replies on as the phase needs."""
        return min(asked, self._needed)

    # After training: agreement, and unmasking.

    def close(self) -> None:
        """Unmask the sum and take the next state; if that cannot be, say why and keep the old."""
        if not self.why:
            try:
                self._unmask()
            except DealerError as error:
                blamed = self._blamed(error)
                for partition in blamed:
                    self._leave_out(partition)
                told = ", ".join(f"partition {partition}" for partition in blamed)
                self.why = f"{error}; skipped from now on: {told}"
            except ValueError as error:
                self.why = str(error)
        self.round_log.secure = self.told
        if self.why:
            self.round_log.refused = self.why
            log.warning("round %d has no effect, the state stays: %s", self.number, self.why)

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

    def _unmask(self) -> None:
        secure, members = self.secure, [c["partition-id"] for c in self.round_log.clients]
        sent = secure.close_masked()
        if len(members) < self.run.config.min_replies:
            raise ValueError(self.round_log.why_too_few_came(self.run.config.min_replies))
        self._needed = secure.schedule.threshold
        alive = [m for m in self.run.registry.members.values() if m.partition_id in members]
        self._ask("agree", alive, sent, ("signature",), secure.take_signature)
        agreed = [m for m in alive if self._place(m) in secure.signatures]
        self._ask("unmask", agreed, secure.close_list(), ("shares",), secure.take_shares)
        here = zip(secure.schedule.partitions, secure.here & ~secure.alive, strict=True)
        opened = secure.open()
        self.told["dropped"] = [partition for partition, dropped in here if dropped]
        self._take_opened(opened)

    def _take_opened(self, opened: UnmaskedSum) -> None:
        """Take the state that the mean changes make."""
        untrained = sum(int((counts == 0).sum()) for counts in opened.counts.values())
        cut_off = float(opened.means[CUT_OFF].max(initial=0.0))
        self.told |= {"untrained": untrained, "cut-off": max(0.0, round(cut_off, 6))}
        if cut_off > OFTEN:
            log.warning(
                "round %d: %.2g %% of the numbers were beyond their bounds and cut off; lower "
                "learning-rate", self.number, 100 * cut_off,
            )  # fmt: skip
        means = (
            _over_all(opened, int(self.secure.alive.sum()))
            if sums_changes(self.method).mean_over_cohort
            else opened.means
        )
        self.run.state.take(moved(self.run.state.tensors, means), self.method.frozen_tensors)

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
        pieces = to_pieces(parts)
        messages = [self._message(kind, member, pieces) for member in members]

        def read(message: Message, member: RegisteredClient, _: int) -> None:
            found = read_phase(message, self.number, names)
            if kind == "shares" and DISTRUSTS in found:
                self._accused.update(_partitions(found[DISTRUSTS]))
                raise ValueError("it does not know the keys of others, and takes no part")
            take(member.partition_id, found)

        self._take(self.send(self.grid, messages, self.run.config.round_timeout), read)

    @property
    def enough(self) -> float:
        return math.inf  # all replies are waited for: no number of them is enough

    def _message(self, kind: str, member: RegisteredClient, pieces: ArrayRecord) -> Message:
        settings = ConfigRecord({"round": self.number})
        content = RecordDict({PIECES: pieces, "config": settings})
        return Message(content, member.node_id, f"train.{kind}", group_id=str(self.number))

    def _place(self, member: RegisteredClient) -> int:
        return self.secure.place(member.partition_id)


def _partitions(data: bytes) -> set[int]:
    """Read whom a client accuses; ValueError if that is no list of partitions."""
    with telling():
        named = json.loads(data)
    if not isinstance(named, list) or not all(type(one) is int for one in named):
        raise ValueError("its list of clients cannot be read, expected partitions")
    return set(named)


def _over_all(opened: UnmaskedSum, clients: int) -> dict[str, NDArray[np.float64]]:
    """Spread each row's mean change over all clients, those too that did not train the row."""
    return {
        name: mean * (opened.counts[name] / clients)[:, None] for name, mean in opened.means.items()
    }
