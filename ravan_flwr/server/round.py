"""Hold one round: a transport (how updates travel) and a release (what their sums become).

A reply takes four steps, each a function of this name:

    fetch (reply_decoder.py)    bytes to message
    check                       message to update, or ValueError: it is rejected with that reason
    accumulate                  update into sums
    close                       sums to the next state

`TRANSPORTS` (transport.py) and `RELEASES` (release.py) list the choices. When a round closes is
decided by its deadline alone (`RoundDeadline`).
"""

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from logging import getLogger
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import CLASSIFIER, Method
from ravan_flwr.runs.client_statistics import spreads_of
from ravan_flwr.runs.record import Metrics
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.message_builder import MessageBuilder
from ravan_flwr.server.release import Release
from ravan_flwr.server.replies import Evaluated, Measures, Update, most_held_back, read_evaluated
from ravan_flwr.server.reply_collector import ReplyCollector
from ravan_flwr.server.reply_fetcher import RoundDeadline, in_process
from ravan_flwr.server.round_log import RoundLog, mean_of
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.state import ServerState
from ravan_flwr.server.status import Status
from ravan_flwr.server.transport import Plain

log = getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Group what all rounds of a run share."""

    config: Config
    method: Method
    registry: ClientRegistry
    sampler: Sampler
    mail: MessageBuilder
    state: ServerState
    status: Status
    trained: set[int]  # partitions of which a reply was used: they have what stays with a client

    def steps(self, member: RegisteredClient) -> int:
        """Count the steps of a client with as many examples: none where nothing is trained."""
        if not self.method.trainable_parameters() and CLASSIFIER not in self.state.tensors:
            return 0
        return self.config.local_steps or self.config.steps_of(self.registry.examples(member))


class Round:
    """Own the log and the messages of one round; `budget` is that of a private run."""

    def __init__(
        self,
        number: int,
        run: Run,
        release: type[Release] = Release,
        transport: type[Plain] = Plain,
        budget: Any = None,
    ) -> None:
        self.number, self.run, self.budget = number, run, budget
        self.method = run.method.in_round(number)
        self.round_log = RoundLog(number, run.registry.partitions)
        self.least = run.config.min_replies  # replies that it needs
        self.without_effect = ""  # why its sums will not be closed, as far as is known
        self.collector = self._open_collector()
        self.release = release(self)
        self.transport = transport(self)
        self.kind = self.transport.kind or self.release.kind  # of the messages to those who train

    def choose(self, grid: Grid) -> list[RegisteredClient]:
        """Choose the clients that train in the round."""
        self.grid = grid
        return self.transport.prepare(self.release.draw(grid))

    def send(
        self, messages: list[Message], timeout: float, *, training: bool = False
    ) -> Iterator[Message]:
        """Send the messages and yield the replies; training ends with as many as it waits for."""
        enough = max(self.release.enough, self.transport.enough) if training else math.inf
        grace: float | None = math.inf
        # Clients that share this machine are none slower than the others.
        if self.release.gives_grace and not in_process(self.grid):
            grace = self.run.config.straggler_grace
        self.collector = self._open_collector()

        def deadline(asked: int) -> RoundDeadline:
            return RoundDeadline(timeout, asked, self.transport.quorum(asked), grace, enough)

        return self.collector.replies(self.grid, messages, deadline)

    def train(self, replies: Iterable[Message]) -> None:
        """Check and accumulate replies to training as they arrive."""
        self.collector.take(replies, self.transport.check, self.accumulate)

    def accumulate(self, update: Update) -> None:
        """Add an update to the sums, and note that it was used."""
        member, bytes_down = update.member, self.collector.sizes[update.member.node_id]
        self.round_log.use(update, self.transport.accumulate(update), bytes_down)
        if update.anew and member.partition_id in self.run.trained:
            self.round_log.lost(member)
        self.run.trained.add(member.partition_id)

    def close(self) -> None:
        """Take the next state; if it is refused, the state stays and the log says why."""
        try:
            self.release.close()
        except ValueError as error:
            self.round_log.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; see who took part in it",
                self.number, error,
            )  # fmt: skip

    def too_few(self) -> RuntimeError:
        """Make the error that stops the run when too few replies were used."""
        return RuntimeError(self.round_log.why_too_few_came(self.least))

    def evaluate(self, replies: Iterable[Message], asked: Measures) -> Metrics | None:
        """Return the mean of the clients' metrics, weighted by what they are means over.

        None if no reply is sound.
        """
        answers: dict[int, Evaluated] = {}
        share, registry = self.run.config.validation_share, self.run.registry

        def check(message: Message, member: RegisteredClient) -> tuple[int, Evaluated]:
            most = most_held_back(registry.examples(member), share)
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

    def _open_collector(self) -> ReplyCollector:
        run = self.run
        return ReplyCollector(run.mail, run.registry.nodes, self.round_log, run.status)
