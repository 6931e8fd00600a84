"""One round: what it asks of clients, what came back, and when its wait for replies ends."""

import math
from collections.abc import Iterator

from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.sparsity import sent_sparsely, sparsify, sparsity_of_round
from ravan_flwr.messages.wire import encode, wire_of_round
from ravan_flwr.methods.base import Tensors
from ravan_flwr.seeding import generator
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.reply_collector import ReplyCollector
from ravan_flwr.server.reply_fetcher import in_process
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.simulated_time.clock import REAL


class Round:
    """The log and the messages of one round. Its release and transport may change its limits."""

    def __init__(self, federation: Federation, number: int, grid: Grid) -> None:
        config = self.config = federation.config
        self.number, self.grid = number, grid
        self.method = federation.method.in_round(number)
        self.log = RoundLog(number, federation.registry.partitions)
        self.collector = ReplyCollector(federation.message_builder, self.log)
        self.recipients: set[int] = set()  # ids of the nodes that were asked
        self.broadcasts: dict[float, ArrayRecord] = {}  # by budget fraction, as they travel
        # When the wait for replies ends. Releases and transports change these when they open.
        self.least = config.min_replies  # valid replies that the round needs
        self.asks_more = True  # are further clients asked if fewer have replied?
        self.enough: float = config.clients_per_round  # valid replies that end the wait at once
        self.quorum = self.least  # valid replies with which the straggler timeout begins
        self.grace = config.straggler_grace  # the straggler timeout; None: automatic
        if in_process(grid) and federation.clock is REAL:
            # Clients in one process share this machine: none is slower than the others.
            self.grace = math.inf

    def send(self, messages: list[Message], enough: float = math.inf) -> Iterator[Message]:
        """Send the messages, and yield the replies until the wait ends."""
        return self.collector.replies(
            self.grid, messages, self.config.round_timeout, self.quorum, self.grace, enough
        )

    def encoded(self, tensors: Tensors) -> ArrayRecord:
        """Return tensors as the wire carries them: sparse and with fewer bits, as configured."""
        wire = wire_of_round(self.config.wire, self.number)
        random = generator(self.config.seed, "wire down", self.number)
        density = sparsity_of_round(self.config.densities, self.number)[0]
        sparse = sparsify(tensors, density, sent_sparsely(self.method))
        return to_record(encode(sparse, wire, random))
