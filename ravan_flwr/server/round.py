"""Hold one round: a transport (how updates travel) and a release (what their sums become).

A reply takes four steps, each a function of this name:

    fetch (superlink.py)    bytes to message
    check                   message to update, or ValueError: it is rejected with that reason
    accumulate              update into sums
    close                   sums to the next state

`TRANSPORTS` (transport.py) and `RELEASES` (release.py) list the choices. The transport also says
when a round closes: by its deadline (`RoundDeadline`), or when a buffer is full.
"""

import math
from collections.abc import Iterable, Iterator
from logging import getLogger
from typing import TYPE_CHECKING

from flwr.app import ArrayRecord, Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import sent_sparsely, sparsify, sparsity_of_round
from ravan_flwr.messages.wire import encode, wire_of_round
from ravan_flwr.methods.base import Tensors
from ravan_flwr.runs.console import count
from ravan_flwr.runs.record import Metrics, spreads_of
from ravan_flwr.seeding import generator
from ravan_flwr.server.release import Release
from ravan_flwr.server.replies import Evaluated, Update, most_validation_size, read_evaluated
from ravan_flwr.server.reply_collector import ReplyCollector
from ravan_flwr.server.reply_fetcher import RoundDeadline, in_process
from ravan_flwr.server.round_log import RoundLog, mean_of
from ravan_flwr.server.transport import Plain
from ravan_flwr.simulated_time.clock import REAL

if TYPE_CHECKING:
    from ravan_flwr.server.strategy import FederatedTuning

log = getLogger(__name__)


class Round:
    """Own the log and the messages of one round."""

    def __init__(
        self,
        number: int,
        run: "FederatedTuning",
        release: type[Release] = Release,
        transport: type[Plain] = Plain,
    ) -> None:
        self.number, self.run = number, run
        self.method = run.method.in_round(number)
        self.round_log = RoundLog(number, run.registry.partitions)
        self.least = run.config.min_replies  # replies that it needs
        self.asked: set[int] = set()  # nodes
        self.collector = self._open_collector()
        self._broadcasts: dict[float, ArrayRecord] = {}  # by share: most methods have one for all
        self.release = release(self)
        self.transport = transport(self)
        self.kind = self.transport.kind or self.release.kind  # of the messages to those who train

    def messages(self, grid: Grid) -> list[Message]:
        """Choose the clients that train, and write each a message with what the method sends it."""
        self.grid = grid
        return self.write(self.transport.prepare(self.transport.draw(grid)))

    def more_messages(self) -> list[Message]:
        """Choose further clients, where too few of the first have replied; none if all were asked.

        Not in a private round, whose account is of those that were drawn.
        """
        may_ask = self.number and self.transport.asks_more and not self.release.budget
        if self.release.has_enough or not may_ask:
            return []
        resting = self.round_log.resting
        drawn = self.run.sampler.sample(
            self.grid,
            self.round_log,
            lambda able: [member for member in able if member.node_id not in self.asked],
        )
        self.round_log.resting = resting
        if drawn:
            log.warning(
                "round %d has %d valid replies, expected %d at least: it asks %s more",
                self.number, len(self.round_log.clients), self.least, count(len(drawn), "client"),
            )  # fmt: skip
        return self.write(self.transport.prepare(drawn))

    def write(self, members: Iterable[RegisteredClient]) -> list[Message]:
        """Write each of these clients a message with what the method sends it."""
        broadcasts, messages = self._broadcasts, []
        for member in members:
            self.asked.add(member.node_id)
            share = member.share if self.method.parts else 1.0
            if share not in broadcasts:
                broadcasts[share] = self.encoded(self.release.broadcast(share))
            given = (self.kind, self.number, broadcasts[share], self.release.settings(member))
            message = self.run.mail.message(member, *given)
            messages.append(self.transport.address(message, member))
        return messages

    def send(
        self, messages: list[Message], timeout: float, *, training: bool = False
    ) -> Iterator[Message]:
        """Send the messages and yield the replies; training ends with as many as it waits for."""
        enough = max(self.release.enough, self.transport.enough) if training else math.inf
        grace: float | None = math.inf
        clock = self.run.clock
        # Clients that share this machine are none slower than the others.
        if self.release.gives_grace and not (in_process(self.grid) and clock is REAL):
            grace = self.run.config.straggler_grace
        self.collector = self._open_collector()

        def deadline(asked: int) -> RoundDeadline:
            return RoundDeadline(timeout, asked, self.transport.quorum(asked), grace, enough, clock)

        return self.collector.replies(self.grid, messages, deadline)

    def take(self, replies: Iterable[Message]) -> None:
        """Check and accumulate the replies of those who train, as they arrive."""
        self.collector.take(replies, self.transport.check, self.accumulate)

    def accumulate(self, update: Update) -> None:
        """Add an update to the sums, and note that it was used."""
        member, sent, run = update.member, self.collector.answered, self.run
        self.round_log.use(
            update, self.transport.accumulate(update), sent.size,
            (run.since(sent.time), run.time), run.clock.device_of(member.partition_id),
        )  # fmt: skip
        if update.anew and member.partition_id in self.run.trained:
            self.round_log.lost(member)
        self.run.trained.add(member.partition_id)

    def close(self) -> None:
        """Take the next state; if it is refused, the state stays and the log says why."""
        try:
            self.release.close()
        except ValueError as error:
            if not self.number:
                raise  # without what a calibration makes there is no run
            self.round_log.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; see who took part in it",
                self.number, error,
            )  # fmt: skip

    def evaluation_messages(self, grid: Grid) -> list[Message]:
        """Write a message to all clients, to evaluate the state."""
        run, kind = self.run, MessageType.EVALUATE
        arrays = self.encoded(run.state.tensors)
        members = run.registry.rested(run.registry.present(grid), kind, self.number)
        return [run.mail.message(one, kind, self.number, arrays, {}) for one in members]

    def evaluated(self, replies: Iterable[Message]) -> Metrics | None:
        """Return the clients' mean metrics, weighted by what they are means over.

        None if no reply is sound.
        """
        run, asked = self.run, self.run.bench.task.measures
        answers: dict[int, Evaluated] = {}
        share = run.config.validation_share

        def check(message: Message, member: RegisteredClient) -> tuple[int, Evaluated]:
            most = most_validation_size(run.registry.examples(member), share)
            return member.partition_id, read_evaluated(message, self.number, asked, most)

        self.collector.take(replies, check, lambda answer: answers.update([answer]))
        if not answers:
            return None
        ordered = [answers[partition] for partition in sorted(answers)]
        numbers = [answer.units for answer in ordered]
        self.round_log.spread = spreads_of([asked.completed(answer.metrics) for answer in ordered])
        return asked.completed(
            {
                name: mean_of([answer.metrics[name] for answer in ordered], numbers)
                for name in asked.names
            }
        )

    def encoded(self, tensors: Tensors) -> ArrayRecord:
        """Encode tensors for the wire."""
        wire = wire_of_round(self.run.config.wire, self.number)
        random = generator(self.run.config.seed, "wire down", self.number)
        share = sparsity_of_round(self.run.config.shares_sent, self.number)[0]
        sparse = sparsify(tensors, share, sent_sparsely(self.method))
        return to_record(encode(sparse, wire, random))

    def _open_collector(self) -> ReplyCollector:
        run = self.run
        return ReplyCollector(run.mail, run.registry.nodes, self.round_log, run.status)
