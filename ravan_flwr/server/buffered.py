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

import torch
from flwr.app import Message, MessageType

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.seeding import generator
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.releases import Release
from ravan_flwr.server.round import Round, Sent
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.runtime import drop_message, in_process
from ravan_flwr.server.sampling import sample
from ravan_flwr.server.transports import Transport
from ravan_flwr.server.waiting import ReplyFetcher, RoundDeadline, pull_replies
from ravan_flwr.simulated_time.clock import SimulatedClock

IN_FLIGHT, TIMES, VERSION = "in-flight/sent", "in-flight/times", "version-"  # names in a checkpoint
TRIES = 32  # random draws of a free client, before the free clients are listed


class Buffered(Transport):
    """Close a round when the buffer is full; other clients continue to train.

    Between rounds it keeps which clients train which version of the state, and these versions.
    """

    def __init__(self, federation: Federation, memory: Mapping[str, torch.Tensor]) -> None:
        super().__init__(federation)
        config = self.config = federation.config
        self.buffer = config.buffer_size or config.clients_per_round
        self.concurrency = config.concurrency or config.clients_per_round
        self.sent: dict[str, Sent] = {}  # by message id: clients that train
        self.versions: dict[int, Tensors] = {}
        self._inbox = ReplyFetcher()  # a separate one: an evaluation does not fetch these replies
        self._memory = memory  # of a simulated run that is resumed
        # Of the round:
        self._pool: list[RegisteredClient] = []
        self._recipients: set[int] = set()  # nodes that are not sent this version (again)
        self._draws = 0

    # A round.

    def draw(self, round_: Round, release: Release) -> list[RegisteredClient]:
        """Draw as many free clients as are missing until `concurrency` clients train."""
        round_.outstanding = self.sent  # one dict: messages of all rounds under way
        self._restore(round_, release)
        self._keep_versions(round_.number)
        round_.versions = self.versions
        sampler = self.federation.sampler
        eligible = sampler.eligible(round_.grid, round_.log)
        self._pool, self._draws = sampler.available(eligible, round_.log), 0
        busy = {sent.client.node_id for sent in self.sent.values()}
        free = [client for client in self._pool if client.node_id not in busy]
        places = min(max(0, self.concurrency - len(busy)), len(free))
        cohort = sample(free, places, self.config.seed, round_.number)
        self._recipients = {client.node_id for client in cohort}
        return cohort

    def exchange(
        self, round_: Round, release: Release, messages: list[Message]
    ) -> Iterator[Message]:
        """Send the messages; yield replies to these and earlier ones until the buffer is full.

        With `min_replies` valid replies, stop also after `concurrency` rejected ones, or at the
        timeout. With fewer, ask further clients, until each was asked once.
        """
        round_.send(messages)
        round_.deadline = deadline = self._make_deadline(round_)
        rejected, late = len(round_.log.rejected), round_.late_replies()
        while self.sent and not deadline.satisfied:
            may_close = len(round_.log.clients) >= release.limits.min_replies
            if may_close and len(round_.log.rejected) - rejected >= self.concurrency:
                break
            # Replies also arrive while the server evaluates: look once before giving one up.
            overdue = self._overdue()
            until = RoundDeadline(0.0, 0, clock=self.federation.clock) if overdue else deadline
            waiting = overdue or list(self.sent)
            replies = pull_replies(round_.grid, self._inbox, waiting, until, late.keys())
            reply = next(replies, None)
            if reply is None:
                self._give_up(round_, overdue or self._overdue())
                if deadline.left <= 0:
                    if may_close:
                        break
                    round_.deadline = deadline = self._make_deadline(round_)
                while replacement := self._draw_replacement(round_.number):
                    round_.send(release.write(replacement))
                late = round_.late_replies()
                continue
            answered = reply.metadata.reply_to_message_id
            if answered in late:
                round_.note_late(reply, late.pop(answered))
                continue
            if answered not in self.sent:
                continue  # its timeout passed while it was being fetched
            yield reply
            if not deadline.satisfied:
                # A client that has replied, validly or not, is replaced at once.
                round_.send(release.write(self._draw_replacement(round_.number)))
        self._keep_versions(round_.number)

    def _make_deadline(self, round_: Round) -> RoundDeadline:
        """Return the end of a wait that begins now."""
        return RoundDeadline(
            self.config.round_timeout, len(self.sent),
            enough=self.buffer - len(round_.log.clients), clock=self.federation.clock,
        )  # fmt: skip

    def _draw_replacement(self, number: int) -> list[RegisteredClient]:
        """Draw a free client that has not trained this version; return [] if there is none."""
        busy = self._recipients | {sent.client.node_id for sent in self.sent.values()}
        self._draws += 1
        random = generator(self.config.seed, "another", number, self._draws)

        def pick(clients: list[RegisteredClient]) -> RegisteredClient:
            return clients[int(torch.randint(len(clients), (), generator=random))]

        if not self._pool or len(self.sent) >= self.concurrency:
            return []
        drawn = next(
            (
                client
                for client in (pick(self._pool) for _ in range(TRIES))
                if client.node_id not in busy
            ),
            None,
        )
        if drawn is None:
            free = [client for client in self._pool if client.node_id not in busy]
            if not free:
                return []
            drawn = pick(free)
        self._recipients.add(drawn.node_id)
        return [drawn]

    def _overdue(self) -> list[str]:
        """Return the ids of messages that were sent longer ago than the timeout."""
        timeout, now = self.config.round_timeout, self.federation.clock.now
        return [key for key, sent in self.sent.items() if now - sent.time >= timeout]

    def _give_up(self, round_: Round, overdue: list[str]) -> None:
        """Stop waiting for the replies to these messages."""
        for key in overdue:
            sent, timeout = self.sent.pop(key), self.config.round_timeout
            self._recipients.add(sent.client.node_id)  # it is not asked again in this round
            round_.log.count_bytes(0, sent.size)
            round_.reject(sent.client, f"no reply within {timeout:g} s")
            node = self.federation.registry.nodes[sent.client.node_id]
            node.note_missed_reply(MessageType.TRAIN, round_.number)
            if in_process(round_.grid):
                drop_message(round_.grid, key)
            else:
                reason = f"late: an update of version {sent.number}, after {timeout:g} s"
                node.expect_late(key, sent.client, reason)

    # Between rounds.

    def _keep_versions(self, number: int) -> None:
        """Keep this version, and those of clients whose update may still count; drop the others."""
        max_staleness = self.config.max_staleness
        oldest = -math.inf if max_staleness is None else number - max_staleness
        needed = {sent.number for sent in self.sent.values() if sent.number >= oldest}
        self.versions = {n: tensors for n, tensors in self.versions.items() if n in needed}
        self.versions[number] = self.federation.state.tensors

    @property
    def memory(self) -> Tensors:
        """Return what a simulated run needs to be resumed; real devices begin again."""
        clock = self.federation.clock
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

    def _restore(self, round_: Round, release: Release) -> None:
        """Resend to clients the versions that they trained when the run was stopped."""
        memory, self._memory = self._memory, {}
        federation, clock = self.federation, self.federation.clock
        if IN_FLIGHT not in memory or not isinstance(clock, SimulatedClock):
            return
        for name, tensor in memory.items():
            if name.startswith(VERSION):
                number, _, key = name.removeprefix(VERSION).partition("/")
                self.versions.setdefault(int(number), {})[key] = tensor
        clients = {client.partition_id: client for client in federation.registry.clients.values()}
        busy_until, arrivals = list(clock.busy_until), dict[str, float]()
        rows = zip(memory[IN_FLIGHT].tolist(), memory[TIMES].tolist(), strict=True)
        for (partition, number), (time, arrives) in rows:
            # A version too old to count is not kept; the reply to it is rejected unread.
            version = self.versions.get(number, federation.state.tensors)
            notes = RoundLog(number, federation.registry.partitions)
            earlier = Round(self.config, federation.message_builder, notes, round_.grid)
            messages = type(release)(federation, earlier, version).write([clients[partition]])
            round_.send(messages)
            key = messages[0].metadata.message_id
            self.sent[key] = replace(self.sent[key], number=number, time=time)
            arrivals[key] = arrives
        clock.restore(arrivals, busy_until)
