"""Hold one round: send its messages, check the replies as they arrive, fold them into sums.

A reply that is not sound is rejected, with its reason in the ledger, and the round goes on. A
calibration round and a training round differ in their sums and in how they close.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from logging import getLogger
from typing import ClassVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import num_bytes, to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.wire import wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Method
from ravan_flwr.methods.extensions import Calibration
from ravan_flwr.methods.tensors import Tensors
from ravan_flwr.runs.client_statistics import spreads_of
from ravan_flwr.runs.record import Metrics
from ravan_flwr.server.aggregation import Aggregate, open_calibration
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.message_builder import MessageBuilder
from ravan_flwr.server.replies import (
    Evaluated,
    Reply,
    Trained,
    most_held_back,
    read_evaluated,
    read_trained,
)
from ravan_flwr.server.reply_collector import ReplyCollector
from ravan_flwr.server.reply_fetcher import in_process
from ravan_flwr.server.robust import FEWEST
from ravan_flwr.server.round_deadline import RoundDeadline
from ravan_flwr.server.round_log import RoundLog, mean_of
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.state import ServerState
from ravan_flwr.server.status import Status
from ravan_flwr.specs import Scalar
from ravan_flwr.tasks.base import Measures

log = getLogger(__name__)


@dataclass(frozen=True)
class Run:
    """Group what all rounds of a run share."""

    config: Config
    method: Method
    registry: ClientRegistry
    mail: MessageBuilder
    state: ServerState
    status: Status
    trained: set[int]  # partitions of which a reply was used: they have what stays with a client

    def steps(self, member: RegisteredClient) -> int:
        """Count the steps of a client with as many examples: none where nothing is trained."""
        if not self.method.trainable_parameters() and CLASSIFIER not in self.state.tensors:
            return 0
        return self.config.local_steps or self.config.steps_of(self.registry.examples(member))


class Round(ABC):
    """Own the ledger, the messages and the sums of one round."""

    kind: ClassVar[str] = MessageType.TRAIN  # of its messages

    def __init__(self, number: int, run: Run) -> None:
        self.number, self.run = number, run
        self.method = run.method.in_round(number)
        self.round_log = RoundLog(number, run.registry.partitions)
        self.least = run.config.min_replies  # replies that it needs
        self.exchange = self._open_exchange()

    @abstractmethod
    def add(self, reply: Reply) -> list[list[int]]:
        """Add a reply to the sums and return its heads, by layer; ValueError if it is not sound."""

    def send(
        self, grid: Grid, messages: list[Message], timeout: float, enough: float = math.inf
    ) -> Iterator[Message]:
        """Send the messages and yield the replies; stop waiting when `enough` were used."""
        self.exchange, grace = self._open_exchange(), self.grace(grid)

        def patience(asked: int) -> RoundDeadline:
            return RoundDeadline(timeout, asked, self.quorum(asked), grace, enough)

        return self.exchange.replies(grid, messages, patience)

    def quorum(self, asked: int) -> int:  # noqa: ARG002 (of a secure round it depends on that)
        """Return with which good reply the grace for stragglers begins."""
        return self.least

    @property
    def enough(self) -> float:
        """Return how many good replies to training end the wait at once."""
        return self.run.config.clients_per_round

    def addressed(self, message: Message, member: RegisteredClient) -> Message:  # noqa: ARG002
        """Add to a message what only this client is sent."""
        return message

    def grace(self, grid: Grid) -> float | None:
        """Return the seconds for stragglers; None: by how long the first half took."""
        # Clients that share this machine are none slower than the others.
        return math.inf if in_process(grid) else self.run.config.straggler_grace

    def fold(self, replies: Iterable[Message]) -> None:
        """Check training replies as they arrive, and add them to the sums."""
        self._take(replies, self._take_trained)

    @property
    def has_enough(self) -> bool:
        """Return whether as many replies were used as the round needs."""
        return len(self.round_log.clients) >= self.least

    def too_few(self) -> RuntimeError:
        """Make the error that stops the run when too few replies were used."""
        return RuntimeError(self.round_log.why_too_few_came(self.least))

    def evaluation(self, replies: Iterable[Message], asked: Measures) -> Metrics | None:
        """Return the mean of the clients' metrics, weighted by what they are means over.

        None if no reply is sound.
        """
        answers: dict[int, Evaluated] = {}
        share, registry = self.run.config.validation_share, self.run.registry

        def take(message: Message, member: RegisteredClient, _: int) -> None:
            most = most_held_back(registry.examples(member), share)
            answers[member.partition_id] = read_evaluated(message, self.number, asked, most)

        self._take(replies, take)
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

    def _take(
        self, replies: Iterable[Message], take: Callable[[Message, RegisteredClient, int], None]
    ) -> None:
        """Take the replies one by one; one that makes `take` raise ValueError is rejected."""
        self.exchange.take(replies, take)

    def _take_trained(self, message: Message, member: RegisteredClient, bytes_down: int) -> None:
        trained = self._read(message, member)
        bytes_up = num_bytes(message.content.array_records["arrays"])
        if METHODS[self.run.config.method].pools:
            everyone = self.run.registry.members.values()
            member = replace(member, examples=sum(one.examples for one in everyone))
        reply = Reply(member, trained, bytes_up, bytes_down, self.steps(member))
        self.round_log.use(reply, heads=self.add(reply))
        if trained.anew and member.partition_id in self.run.trained:
            self.round_log.lost(member)
        self.run.trained.add(member.partition_id)

    def _read(self, message: Message, member: RegisteredClient) -> Trained:
        """Read a training reply of this round, of a node with the server's bases."""
        wire = wire_of_round(self.run.config.wire, self.number)
        most = self._most_numbers(member.share)
        return read_trained(
            message, member, self.number, self.run.state.derived, wire, most,
            personal=self.run.method.personal is not None,
            with_loss=self.run.config.privacy == "none",
            with_seconds=not self.run.config.noised_on_devices,
        )  # fmt: skip

    def _most_numbers(self, share: float) -> int:
        """Return how many numbers an upload of a client with that share has, at most."""
        classifier = self.run.state.tensors.get(CLASSIFIER)
        shapes = self.method.upload_shapes(share).values()
        return sum(map(math.prod, shapes)) + (0 if classifier is None else classifier.numel())

    def steps(self, member: RegisteredClient) -> int:
        """Count the steps that a client takes in this round."""
        return self.run.steps(member)

    def _weight(self, member: RegisteredClient) -> float:
        """Return a reply's weight in a mean."""
        by_examples = self.run.config.weighting == "examples"
        return float(self.run.registry.examples(member)) if by_examples else 1.0

    def _open_exchange(self) -> ReplyCollector:
        run = self.run
        return ReplyCollector(run.mail, run.registry.nodes, self.round_log, run.status)


class TrainingRound(Round):
    """Fold the clients' uploads into the next global state."""

    @cached_property
    def sums(self) -> Aggregate:
        """Return the sums, which open empty when the first reply is there."""
        return self.run.state.open_sums(self.method)

    def choose(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        """Sample the clients that train in the round."""
        return sampler.sample(grid, self.round_log)

    def settings(self, member: RegisteredClient) -> dict[str, Scalar]:  # noqa: ARG002
        """Return what a client's message says beside what all messages say."""
        return {}

    def add(self, reply: Reply) -> list[list[int]]:
        upload, member = reply.trained.upload, reply.member
        step = self.run.config.learning_rate * reply.steps
        self.sums.offer(upload, member.share, self._weight(member), step)
        return self.method.heads_in(upload)

    def close(self) -> None:
        """Take the next state; if it is refused, the state stays and the ledger says why."""
        robust, count = self.run.config.robust, self.sums.count
        if robust != "none" and count < FEWEST:
            log.warning(
                "round %d: %d replies came, and robust = %r changes nothing with fewer than %d",
                self.number, count, robust, FEWEST,
            )  # fmt: skip
        try:
            self.run.state.advance(self.sums)
        except ValueError as error:
            self.round_log.refused = str(error)
            log.warning(
                "round %d has no effect, the state stays as it was: %s; see who took part in it",
                self.number, error,
            )  # fmt: skip
        del self.sums  # those of a robust round hold every reply


class CalibrationRound(Round):
    """Fold the clients' replies to a calibration into the method's fixed tensors: round 0."""

    kind = f"{MessageType.TRAIN}.calibrate"

    def __init__(self, run: Run, calibration: Calibration) -> None:
        super().__init__(0, run)
        config, self.everyone = run.config, calibration.everyone
        self.by_steps = calibration.by_steps
        most = max(map(super().steps, run.registry.members.values()), default=0)
        step = config.calibration_learning_rate * most
        self.sums = open_calibration(calibration, config.max_update_norm, step, config.robust)
        if config.robust != "none":
            self.least = max(self.least, FEWEST)

    @classmethod
    def open(cls, run: Run) -> "CalibrationRound | None":
        """Open the method's calibration round; None if it has none, or it was held before."""
        calibration = run.method.calibration
        if calibration is None or run.mail.fixed is not None:
            return None
        return cls(run, calibration)

    @property
    def enough(self) -> float:
        return math.inf if self.everyone else super().enough

    def steps(self, member: RegisteredClient) -> int:
        return super().steps(member) if self.by_steps else self.run.config.calibration_steps

    def add(self, reply: Reply) -> list[list[int]]:
        self.sums.add(reply.trained.upload, self._weight(reply.member))
        return []

    def close(self) -> Tensors:
        """Change the initial state, and return the fixed tensors, which travel from now on."""
        fixed, changed = self.sums.close()
        self.run.state.tensors |= changed
        self.run.mail.keep_fixed(to_record(fixed))
        return fixed
