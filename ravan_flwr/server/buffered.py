"""Close a round as soon as a buffer is full of updates (`aggregation=async`).

FedBuff (Nguyen et al., arXiv 2106.06639): `concurrency` clients train at all times. Whoever has
answered is replaced by another client, which is sent the state of today, version v. When
`buffer-size` updates are there, the state moves, and v is one more: each version is a round. An
update against version v that arrives s versions later counts with its change, less the older it is:

    upload - state_v  ->  state_now + (1 + s)^(-1/2) (upload - state_v)

The round takes these as it takes any upload. Over frozen bases changes add up exactly. An update
that is not stale is taken as it is, so that a buffer of all clients makes a synchronous round.

A client trains a version once: a second time it would do the same.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import start_of
from ravan_flwr.methods.base import Method, Tensors, split_classifier
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import check_upload, outgoing
from ravan_flwr.server.kind import Kind
from ravan_flwr.server.replies import Update
from ravan_flwr.server.reply_collector import Sent
from ravan_flwr.server.reply_fetcher import ReplyFetcher, RoundDeadline, pull_replies
from ravan_flwr.server.sampling import sample
from ravan_flwr.simulated_time.clock import SimulatedClock

if TYPE_CHECKING:
    from ravan_flwr.server.round import Round

OUT, TIMES, VERSION = "in-flight/sent", "in-flight/times", "version-"  # names in a checkpoint
TRIES = 32  # to draw a client that is free, before the free ones are listed


def weight_of_staleness(staleness: int) -> float:
    """Return by how much an update counts that is so many versions old."""
    return float((1 + staleness) ** -0.5)


def rebased(
    method: Method, upload: Tensors, fraction: float, then: Tensors, now: Tensors, weight: float
) -> Tensors:
    """Make the upload that changes `now` by so much of what an upload has changed in `then`.

    ValueError if the upload's form is not sound.
    """
    check_upload(method, upload, split_classifier(then)[1], fraction)
    before, after = (
        start_of(method, upload, outgoing(method, state, fraction)) for state in (then, now)
    )
    return {
        name: (after[name].double() + weight * (tensor.double() - before[name].double())).float()
        if name in before
        else tensor
        for name, tensor in upload.items()
    }


class InFlight:
    """Keep who is out with which version, and those versions, from one round to the next."""

    def __init__(self, memory: Mapping[str, torch.Tensor]) -> None:
        self.sent: dict[str, Sent] = {}  # by message id
        self.versions: dict[int, Tensors] = {}
        self.inbox = ReplyFetcher()  # of its own: an evaluation does not see these replies
        self._memory = memory  # of a simulated run that goes on

    def keep(self, number: int, state: Tensors, most: int | None) -> None:
        """Keep this version, and those that somebody is out with whose update may still count."""
        oldest = -math.inf if most is None else number - most
        needed = {sent.number for sent in self.sent.values() if sent.number >= oldest}
        self.versions = {n: tensors for n, tensors in self.versions.items() if n in needed}
        self.versions[number] = state

    def memory(self, clock: object) -> Tensors:
        """Return what a simulated run needs to go on; devices that are real start anew."""
        if not isinstance(clock, SimulatedClock) or not self.sent:
            return {}
        out = [(sent.client.partition_id, sent.number) for sent in self.sent.values()]
        times = [(sent.time, clock.times[key]) for key, sent in self.sent.items()]
        needed = {sent.number for sent in self.sent.values()} & self.versions.keys()
        return {
            OUT: torch.tensor(out),
            TIMES: torch.tensor(times, dtype=torch.float64),
        } | {
            f"{VERSION}{number}/{name}": tensor
            for number in sorted(needed)
            for name, tensor in self.versions[number].items()
        }

    def restore(self, round_: "Round", grid: Grid) -> None:
        """Send clients once more what they were out with when the run was stopped."""
        memory, self._memory = self._memory, {}
        clock, run = round_.run.clock, round_.run
        if OUT not in memory or not isinstance(clock, SimulatedClock):
            return
        for name, tensor in memory.items():
            if name.startswith(VERSION):
                number, _, key = name.removeprefix(VERSION).partition("/")
                self.versions.setdefault(int(number), {})[key] = tensor
        clients = {client.partition_id: client for client in run.registry.clients.values()}
        free, now = list(clock.free), run.state.tensors
        arrivals: dict[str, float] = {}
        rows = zip(memory[OUT].tolist(), memory[TIMES].tolist(), strict=True)
        for (partition, number), (time, arrives) in rows:
            # One that is too old to count is kept no longer, and the reply is rejected unread.
            run.state.tensors = self.versions.get(number, now)
            (message,) = run.open_round(number).write([clients[partition]])
            round_.collector.send(grid, [message])
            key = message.metadata.message_id
            self.sent[key] = replace(round_.collector.outstanding[key], number=number, time=time)
            arrivals[key] = arrives
        run.state.tensors = now
        clock.restore(arrivals, free)


class Buffered(Kind):
    """Close a round when the buffer is full; the clients that are still out stay out."""

    asks_more = False  # whoever has answered, well or not, is replaced at once

    def __init__(self, round_: "Round") -> None:
        super().__init__(round_)
        config = self.run.config
        self.in_flight, self.config = self.run.in_flight, config
        self.buffer = config.buffer_size or config.clients_per_round
        self.concurrency = config.concurrency or config.clients_per_round
        self._pool: list[RegisteredClient] = []
        self._recipients: set[int] = set()  # nodes that were sent this version
        self._draws = 0

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Fill the places of the clients that are not out any more."""
        round_, run, number = self.round, self.run, self.round.number
        round_.collector.outstanding = self.in_flight.sent
        self.in_flight.restore(round_, grid)
        self._give_up()
        self.in_flight.keep(number, run.state.tensors, self.config.max_staleness)
        able = run.sampler.able(grid, round_.round_log)
        self._pool = run.sampler.available(able, round_.round_log)
        busy = {sent.client.node_id for sent in self.in_flight.sent.values()}
        free = [client for client in self._pool if client.node_id not in busy]
        places = min(max(0, self.concurrency - len(busy)), len(free))
        cohort = sample(free, places, self.config.seed, number)
        self._recipients = {client.node_id for client in cohort}
        return cohort

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send the messages, and yield replies to these and earlier ones until the buffer is full.

        Also if as many replies as are out at a time were rejected.
        """
        round_, run = self.round, self.run
        collector, grid = round_.collector, round_.grid
        collector.send(grid, messages)
        out = [sent.client for sent in self.in_flight.sent.values()]
        run.status.begin("training", round_.number, clients=out)
        deadline = RoundDeadline(
            self.config.round_timeout, len(out), enough=self.buffer, clock=run.clock
        )
        collector.deadline = deadline
        refused, outstanding = len(round_.round_log.rejected), self.in_flight.sent
        while outstanding and not deadline.satisfied:
            if len(round_.round_log.rejected) - refused >= self.concurrency:
                break
            reply = next(
                pull_replies(grid, self.in_flight.inbox, list(outstanding), deadline), None
            )
            if reply is None:
                self._give_up()
                break
            if reply.metadata.reply_to_message_id not in outstanding:
                continue  # it was being fetched when it was given up
            yield reply
            if not deadline.satisfied:
                collector.send(grid, round_.write(self._another()))
        self.in_flight.keep(round_.number, run.state.tensors, self.config.max_staleness)

    def check(self, message: Message, client: RegisteredClient) -> Update:
        """Read the reply to the version that its client was sent, and bring it to this one."""
        sent, most = self.round.collector.answered, self.config.max_staleness
        staleness = self.round.number - sent.number
        if most is not None and staleness > most:
            raise ValueError(
                f"its update is {staleness} versions old, expected at most max-staleness = {most}"
            )
        update = super().check(message, client)
        if not staleness:
            return update
        upload = rebased(
            self.round.method, update.upload, client.budget_fraction,
            self.in_flight.versions[sent.number], self.run.state.tensors,
            weight_of_staleness(staleness),
        )  # fmt: skip
        return replace(update, upload=upload, staleness=staleness)

    def _another(self) -> list[RegisteredClient]:
        """Draw a client that is not out, and has not trained this version; none if none is left."""
        busy = self._recipients | {sent.client.node_id for sent in self.in_flight.sent.values()}
        self._draws += 1
        random = generator(self.config.seed, "another", self.round.number, self._draws)

        def pick(clients: list[RegisteredClient]) -> RegisteredClient:
            return clients[int(torch.randint(len(clients), (), generator=random))]

        if not self._pool or len(self.in_flight.sent) >= self.concurrency:
            return []
        drawn = next(
            (m for m in (pick(self._pool) for _ in range(TRIES)) if m.node_id not in busy),
            None,
        )
        if drawn is None:
            free = [client for client in self._pool if client.node_id not in busy]
            if not free:
                return []
            drawn = pick(free)
        self._recipients.add(drawn.node_id)
        return [drawn]

    def _give_up(self) -> None:
        """Stop waiting for replies that have not come within the timeout."""
        timeout, now = self.config.round_timeout, self.run.clock.now
        for key, sent in list(self.in_flight.sent.items()):
            if now - sent.time >= timeout:
                del self.in_flight.sent[key]
                self.round.round_log.count(0, sent.size)
                self.round.collector.reject(sent.client, f"no reply within {timeout:g} s")
                node = self.run.registry.nodes[sent.client.node_id]
                node.note_missed_reply(MessageType.TRAIN, self.round.number)
