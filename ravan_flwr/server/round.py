"""Run one round: write its messages, process the replies, keep its log.

A reply takes four steps, each a function of that name:

    fetch        bytes to message (superlink.py)
    check        message to update, or ValueError: it is rejected with that reason (kind.py)
    accumulate   update into sums (kind.py)
    close        sums to the next state (kind.py)

Everything that differs between kinds of rounds is in their `Kind`.
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
from ravan_flwr.runs.record import Metrics, per_client_statistics
from ravan_flwr.seeding import generator
from ravan_flwr.server.kind import Kind
from ravan_flwr.server.replies import most_validation_size, read_evaluated
from ravan_flwr.server.reply_collector import ReplyCollector
from ravan_flwr.server.reply_fetcher import in_process
from ravan_flwr.server.round_log import RoundLog, mean_of
from ravan_flwr.simulated_time.clock import REAL

if TYPE_CHECKING:
    from ravan_flwr.server.strategy import FederatedTuning

log = getLogger(__name__)


class Round:
    """Own the log and the messages of one round."""

    grid: Grid  # from `messages` on

    def __init__(self, number: int, run: "FederatedTuning", kind: type[Kind]) -> None:
        self.number, self.run = number, run
        self.method = run.method.in_round(number)
        self.round_log = RoundLog(number, run.registry.partitions)
        self.least = run.config.min_replies  # valid replies that the round needs
        self.recipients: set[int] = set()  # ids of the nodes that were asked
        self.collector = ReplyCollector(run.message_builder, self.round_log)
        # By budget fraction; most methods have one broadcast for all.
        self._broadcasts: dict[float, ArrayRecord] = {}
        self.kind = kind(self)

    def messages(self, grid: Grid) -> list[Message]:
        """Draw the clients that train, and return a message for each."""
        self.grid = grid
        return self.write(self.kind.prepare(self.kind.draw(grid)))

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send the messages and yield the replies; ask further clients if too few are valid.

        A node's failure loses its reply, but not the run while other clients can be asked.
        """
        yield from self.kind.replies(messages)
        while extra := self._more_messages():
            yield from self.send(extra, training=True)

    def take(self, replies: Iterable[Message]) -> None:
        """Check the replies to training, and accumulate the updates."""
        self.collector.take(replies, self.kind.check, self.kind.accumulate)

    def close(self) -> None:
        """Compute the next state; raise RuntimeError if too few replies are valid.

        If the new state is refused, the old one stays and the reason is logged.
        """
        if not self.kind.has_enough:
            raise RuntimeError(self.round_log.too_few_replies_message(self.least))
        try:
            self.kind.close()
        except ValueError as error:
            if not self.number:
                raise  # without the calibration's fixed tensors the run cannot start
            self.round_log.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; the record lists clients",
                self.number, error,
            )  # fmt: skip

    def _more_messages(self) -> list[Message]:
        """Return messages to further clients if too few replied; none if all clients were asked.

        Return none in a private round: its account counts only the clients that were drawn.
        """
        if self.kind.has_enough or not self.kind.asks_more:
            return []
        skipped = self.round_log.skipped
        clients = self.run.sampler.sample(
            self.grid,
            self.round_log,
            lambda eligible: [
                client for client in eligible if client.node_id not in self.recipients
            ],
        )
        self.round_log.skipped = skipped
        if clients:
            log.warning(
                "round %d has %d valid replies, expected %d at least: it asks %s more",
                self.number, len(self.round_log.clients), self.least, count(len(clients), "client"),
            )  # fmt: skip
        return self.write(clients)

    def write(self, clients: Iterable[RegisteredClient]) -> list[Message]:
        """Return a message with the broadcast for each of these clients."""
        broadcasts, messages = self._broadcasts, []
        for client in clients:
            self.recipients.add(client.node_id)
            fraction = client.budget_fraction if self.method.parts else 1.0
            if fraction not in broadcasts:
                broadcasts[fraction] = self._encoded(self.kind.broadcast(fraction))
            message = self.run.message_builder.message(
                client, self.kind.message_type, self.number, broadcasts[fraction],
                self.kind.settings(client),
            )  # fmt: skip
            messages.append(self.kind.address(message, client))
        return messages

    def send(self, messages: list[Message], *, training: bool = False) -> Iterator[Message]:
        """Send the messages and yield the replies; stop early in training if enough were used."""
        kind, timeout = self.kind, self.run.config.round_timeout
        enough = kind.enough if training else math.inf
        # Clients in one process share this machine: none is slower than the others.
        waits = kind.gives_grace and not (in_process(self.grid) and self.run.clock is REAL)
        grace = self.run.config.straggler_grace if waits else math.inf
        return self.collector.replies(self.grid, messages, timeout, kind.quorum, grace, enough)

    def evaluation_messages(self, grid: Grid) -> list[Message]:
        """Return a message to evaluate the state for each client that is not skipped."""
        run, kind = self.run, MessageType.EVALUATE
        arrays = self._encoded(run.state.tensors)
        clients = run.registry.without_skipped(run.registry.present(grid), kind, self.number)
        return [
            run.message_builder.message(client, kind, self.number, arrays, {}) for client in clients
        ]

    def evaluated(self, replies: Iterable[Message]) -> Metrics | None:
        """Return the clients' mean metrics, weighted by their numbers of examples or other units.

        Return None if no reply is valid.
        """
        run, measures = self.run, self.run.loaded.task.measures
        answers: dict[int, tuple[float, Metrics]] = {}

        def check(message: Message, client: RegisteredClient) -> tuple[int, tuple[float, Metrics]]:
            most = most_validation_size(run.registry.examples(client), run.config.validation_share)
            return client.partition_id, read_evaluated(message, self.number, measures, most)

        self.collector.take(replies, check, lambda answer: answers.update([answer]))
        if not answers:
            return None
        units, means = zip(*(answers[partition] for partition in sorted(answers)), strict=True)
        self.round_log.per_client = per_client_statistics(list(map(measures.completed, means)))
        return measures.completed(
            {name: mean_of([mean[name] for mean in means], units) for name in measures.names}
        )

    def _encoded(self, tensors: Tensors) -> ArrayRecord:
        """Return tensors as the wire carries them: sparse and with fewer bits, as configured."""
        wire = wire_of_round(self.run.config.wire, self.number)
        random = generator(self.run.config.seed, "wire down", self.number)
        density = sparsity_of_round(self.run.config.densities, self.number)[0]
        sparse = sparsify(tensors, density, sent_sparsely(self.method))
        return to_record(encode(sparse, wire, random))
