"""Close a round as soon as a buffer is full of updates (`aggregation=async`).

FedBuff (Nguyen et al., arXiv 2106.06639): `concurrency` clients train at all times. A client that
has replied is replaced by another client, which is sent the current state, version v. After
`buffer-size` updates the state moves, and v increases by one: each version is a round. An update
from version v that arrives s versions later contributes its change, with less weight the older it
is:

    upload - state_v  ->  state_now + (1 + s)^(-1/2) (upload - state_v)

The round accumulates these like other uploads. Over frozen bases changes add up exactly. An update
that is not stale is used unchanged, so a buffer of all clients makes a synchronous round.

A client trains a version once: its second update would be the same.
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

IN_FLIGHT, TIMES, VERSION = "in-flight/sent", "in-flight/times", "version-"  # names in a checkpoint
TRIES = 32  # random draws of a free client, before the free clients are listed


def weight_of_staleness(staleness: int) -> float:
    """Return the weight of an update that is `staleness` versions old."""
    return float((1 + staleness) ** -0.5)


def rebased(
    method: Method,
    upload: Tensors,
    fraction: float,
    old_state: Tensors,
    new_state: Tensors,
    weight: float,
) -> Tensors:
    """Return an upload that changes `new_state` by `weight` times its change of `old_state`.

    Raise ValueError if the upload's names, shapes or types are wrong.
    """
    check_upload(method, upload, split_classifier(old_state)[1], fraction)
    before, after = (
        start_of(method, upload, outgoing(method, state, fraction))
        for state in (old_state, new_state)
    )
    return {
        name: (after[name].double() + weight * (tensor.double() - before[name].double())).float()
        if name in before
        else tensor
        for name, tensor in upload.items()
    }


class InFlight:
    """Keep, between rounds, which clients train which version of the state, and these versions."""

    def __init__(self, memory: Mapping[str, torch.Tensor]) -> None:
        self.sent: dict[str, Sent] = {}  # by message id
        self.versions: dict[int, Tensors] = {}
        self.inbox = ReplyFetcher()  # a separate one: an evaluation does not fetch these replies
        self._memory = memory  # of a simulated run that is resumed

    def keep(self, number: int, state: Tensors, most: int | None) -> None:
        """Keep this version, and those of clients whose update may still count; drop the others."""
        oldest = -math.inf if most is None else number - most
        needed = {sent.number for sent in self.sent.values() if sent.number >= oldest}
        self.versions = {n: tensors for n, tensors in self.versions.items() if n in needed}
        self.versions[number] = state

    def memory(self, clock: object) -> Tensors:
        """Return what a simulated run needs to be resumed; real devices begin again."""
        if not isinstance(clock, SimulatedClock) or not self.sent:
            return {}
        out = [(sent.client.partition_id, sent.number) for sent in self.sent.values()]
        times = [(sent.time, clock.times[key]) for key, sent in self.sent.items()]
        needed = {sent.number for sent in self.sent.values()} & self.versions.keys()
        return {
            IN_FLIGHT: torch.tensor(out),
            TIMES: torch.tensor(times, dtype=torch.float64),
        } | {
            f"{VERSION}{number}/{name}": tensor
            for number in sorted(needed)
            for name, tensor in self.versions[number].items()
        }

    def restore(self, round_: "Round", grid: Grid) -> None:
        """Resend to clients the versions that they trained when the run was stopped."""
        memory, self._memory = self._memory, {}
        clock, run = round_.run.clock, round_.run
        if IN_FLIGHT not in memory or not isinstance(clock, SimulatedClock):
            return
        for name, tensor in memory.items():
            if name.startswith(VERSION):
                number, _, key = name.removeprefix(VERSION).partition("/")
                self.versions.setdefault(int(number), {})[key] = tensor
        clients = {client.partition_id: client for client in run.registry.clients.values()}
        busy_until, now = list(clock.busy_until), run.state.tensors
        arrivals: dict[str, float] = {}
        rows = zip(memory[IN_FLIGHT].tolist(), memory[TIMES].tolist(), strict=True)
        for (partition, number), (time, arrives) in rows:
            # A version too old to count is not kept; the reply to it is rejected unread.
            run.state.tensors = self.versions.get(number, now)
            (message,) = run.open_round(number).write([clients[partition]])
            round_.collector.send(grid, [message])
            key = message.metadata.message_id
            self.sent[key] = replace(round_.collector.outstanding[key], number=number, time=time)
            arrivals[key] = arrives
        run.state.tensors = now
        clock.restore(arrivals, busy_until)


class Buffered(Kind):
    """Close a round when the buffer is full; other clients continue to train."""

    asks_more = False  # a client that has replied, validly or not, is replaced at once

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
        """Draw clients until `concurrency` clients train."""
        round_, run, number = self.round, self.run, self.round.number
        round_.collector.outstanding = self.in_flight.sent
        self.in_flight.restore(round_, grid)
        self._give_up()
        self.in_flight.keep(number, run.state.tensors, self.config.max_staleness)
        eligible = run.sampler.eligible(grid, round_.round_log)
        self._pool = run.sampler.available(eligible, round_.round_log)
        busy = {sent.client.node_id for sent in self.in_flight.sent.values()}
        free = [client for client in self._pool if client.node_id not in busy]
        places = min(max(0, self.concurrency - len(busy)), len(free))
        cohort = sample(free, places, self.config.seed, number)
        self._recipients = {client.node_id for client in cohort}
        return cohort

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send the messages; yield replies to these and earlier ones until the buffer is full.

        Stop also after `concurrency` rejected replies.
        """
        round_, run = self.round, self.run
        collector, grid = round_.collector, round_.grid
        collector.send(grid, messages)
        out = [sent.client for sent in self.in_flight.sent.values()]
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
                continue  # its timeout passed while it was being fetched
            yield reply
            if not deadline.satisfied:
                collector.send(grid, round_.write(self._draw_replacement()))
        self.in_flight.keep(round_.number, run.state.tensors, self.config.max_staleness)

    def check(self, message: Message, client: RegisteredClient) -> Update:
        """Return the update in a reply, rebased to this version; reject it if it is too old."""
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

    def _draw_replacement(self) -> list[RegisteredClient]:
        """Draw a free client that has not trained this version; return [] if there is none."""
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
        """Stop waiting for replies that have not arrived within the timeout."""
        timeout, now = self.config.round_timeout, self.run.clock.now
        for key, sent in list(self.in_flight.sent.items()):
            if now - sent.time >= timeout:
                del self.in_flight.sent[key]
                self.round.round_log.count(0, sent.size)
                self.round.collector.reject(sent.client, f"no reply within {timeout:g} s")
                node = self.run.registry.nodes[sent.client.node_id]
                node.note_missed_reply(MessageType.TRAIN, self.round.number)
