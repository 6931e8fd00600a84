"""Kinds of rounds: how updates travel, and how their sums become the next state.

`Kind` is a plain round: the server reads updates one by one until a deadline, and the method makes
the next state from their sums. Other kinds override what differs. `KINDS` lists them.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from pkgutil import resolve_name
from typing import TYPE_CHECKING, ClassVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import num_bytes
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import WHOLE, sparsity_of_round
from ravan_flwr.messages.wire import wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Tensors
from ravan_flwr.server.aggregation import FEWEST, Aggregate, CalibrationSums, moved, outgoing
from ravan_flwr.server.replies import Update, read_trained
from ravan_flwr.specs import Scalar
from ravan_flwr.training.adapted_model import AdaptedModel

if TYPE_CHECKING:
    from ravan_flwr.server.privacy_budget import PrivacyBudget
    from ravan_flwr.server.round import Round

log = getLogger(__name__)

# By `Config.transport` and `privacy`. A kind is imported when a run uses it.
KINDS = {
    ("plain", "none"): "ravan_flwr.server.kind:Kind",
    ("plain", "client"): "ravan_flwr.server.noised:Noised",
    ("plain", "example"): "ravan_flwr.extras.example_privacy:Counted",
    ("buffered", "none"): "ravan_flwr.server.buffered:Buffered",
    ("masked", "none"): "ravan_flwr.extras.masked:Masked",
}


def kind_of(config: Config) -> "type[Kind]":
    """Return the kind of a run's rounds."""
    kind: type[Kind] = resolve_name(KINDS[config.transport, config.privacy])
    return kind


class Kind:
    """A plain round: read updates one by one; the method makes the next state from their sums.

    The round closes when the clients that were drawn have replied, or the deadline has passed.
    """

    budget: "ClassVar[type[PrivacyBudget] | None]" = None  # the account of a private kind
    message_type: ClassVar[str] = MessageType.TRAIN
    gives_grace = True  # Does the straggler timeout apply? Else the round waits for every client.
    asks_more = True  # Are further clients asked if too few have replied?

    def __init__(self, round_: "Round") -> None:
        self.round, self.run = round_, round_.run

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError if this kind cannot release updates of the model."""

    # Before training.

    @staticmethod
    def cohort(config: Config, partitions: int) -> int:  # noqa: ARG004
        """Return how many clients must be connected before a round begins."""
        return config.min_replies

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Sample the clients that are sent a message when the round opens."""
        return self.run.sampler.sample(grid, self.round.round_log)

    def prepare(self, cohort: list[RegisteredClient]) -> list[RegisteredClient]:
        """Return the clients of a cohort that are asked to train."""
        return cohort

    def broadcast(self, fraction: float) -> Tensors:
        """Return the tensors that a client with that budget fraction is sent."""
        return outgoing(self.round.method, self.run.state.tensors, fraction)

    def settings(self, client: RegisteredClient) -> dict[str, Scalar]:  # noqa: ARG002
        """Return the settings that only this client's message has."""
        return {}

    def address(self, message: Message, client: RegisteredClient) -> Message:  # noqa: ARG002
        """Add the records that only this client is sent; return the message."""
        return message

    # While clients train.

    @property
    def enough(self) -> float:
        """Return how many valid training replies end the wait at once."""
        return self.run.config.clients_per_round

    @property
    def has_enough(self) -> bool:
        """Return whether as many replies were used as the round needs."""
        return len(self.round.round_log.clients) >= self.round.least

    @property
    def quorum(self) -> int:
        """Return the number of valid replies after which the straggler timeout begins."""
        return self.round.least

    def replies(self, messages: list[Message]) -> Iterator[Message]:
        """Send the messages, and yield the replies until the round closes."""
        return self.round.send(messages, training=True)

    def steps(self, client: RegisteredClient) -> int:
        """Return how many local steps a client takes in this round."""
        return self.run.steps(client)

    def check(self, message: Message, client: RegisteredClient) -> Update:
        """Return the update in a client's reply; raise ValueError with the reason to reject it."""
        run, number = self.run, self.round.collector.answered.number
        sparsity = sparsity_of_round(run.config.densities, number)
        classifier = run.state.tensors.get(CLASSIFIER)
        shapes = self.round.method.upload_shapes(client.budget_fraction).values()
        most = sum(map(math.prod, shapes)) + (0 if classifier is None else classifier.numel())
        trained = read_trained(
            message, client, number, run.state.derived, wire_of_round(run.config.wire, number),
            most, sparsity[1], personal=run.method.personal is not None,
            with_loss=run.config.privacy == "none",
            with_seconds=run.config.privacy != "example",
        )  # fmt: skip
        if sparsity != WHOLE:  # the upload is the change from the state that the client was sent
            state = run.in_flight.versions.get(number, run.state.tensors)
            upload = moved(self.round.method, trained.upload, client.budget_fraction, state)
            trained = replace(trained, upload=upload)
        if METHODS[run.config.method].pools:
            everyone = run.registry.clients.values()
            client = replace(client, examples=sum(each.examples for each in everyone))
        bytes_up = num_bytes(message.content.array_records["arrays"])
        return replace(trained, client=client, bytes_up=bytes_up, steps=self.steps(client))

    def accumulate(self, update: Update) -> None:
        """Add an update to the sums and to the log; raise ValueError if it is not valid."""
        heads = self.add(update)
        run, client, sent = self.run, update.client, self.round.collector.answered
        span = run.since(sent.time), run.time
        device = run.clock.device_of(client.partition_id)
        self.round.round_log.use(update, heads, sent.size, span, device)
        if update.anew and client.partition_id in run.trained:
            self.round.round_log.began_anew.append(client.partition_id)
            log.warning(
                "partition %d has lost its personal parameters, as a restarted node does",
                client.partition_id,
            )
        run.trained.add(client.partition_id)

    # Sums, of kinds that read updates one by one.

    @cached_property
    def sums(self) -> Aggregate:
        """Return the round's sums, empty before the first reply."""
        return self.run.state.open_sums(self.round.method)

    def weight(self, client: RegisteredClient) -> float:
        """Return an update's weight in a mean."""
        by_examples = self.run.config.weighting == "examples"
        return float(self.run.registry.examples(client)) if by_examples else 1.0

    def add(self, update: Update) -> list[list[int]]:
        """Add an update to the sums; return its heads, by layer."""
        client, step = update.client, self.run.config.learning_rate * update.steps
        self.sums.offer(update.upload, client.budget_fraction, self.weight(client), step)
        return self.round.method.heads_in(update.upload)

    def mean(self) -> Tensors:
        """Return the state that the sums make; raise ValueError if the round has no effect."""
        robust, count = self.run.config.robust, self.sums.count
        if robust != "none" and count < FEWEST:
            log.warning(
                "round %d: %d replies came, and weighting = %r changes nothing with fewer than %d",
                self.round.number, count, robust, FEWEST,
            )  # fmt: skip
        sums = self.sums
        del self.sums  # in a robust round they hold every reply
        return sums.close()

    def close(self) -> None:
        """Take the next state; raise ValueError and keep the old one if the round has no effect."""
        self.run.state.take(self.mean(), self.round.method.frozen_tensors)


class Calibrated(Kind):
    """Round 0: make the method's fixed tensors from the clients' uploads."""

    message_type = f"{MessageType.TRAIN}.calibrate"
    asks_more = False

    def __init__(self, round_: "Round") -> None:
        super().__init__(round_)
        config, calibration = self.run.config, self.run.method.calibration
        assert calibration is not None
        self.all_clients, self.by_steps = calibration.all_clients, calibration.by_steps
        most = max(map(self.run.steps, self.run.registry.clients.values()), default=0)
        step = config.calibration_learning_rate * most
        self.calibration_sums = CalibrationSums(
            calibration, config.max_update_norm, step, config.robust
        )
        if config.robust != "none":
            round_.least = max(round_.least, FEWEST)

    @property
    def enough(self) -> float:
        return math.inf if self.all_clients else super().enough

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        choose = self.run.sampler.eligible if self.all_clients else self.run.sampler.sample
        return choose(grid, self.round.round_log)

    def broadcast(self, fraction: float) -> Tensors:  # noqa: ARG002
        return self.run.state.tensors

    def steps(self, client: RegisteredClient) -> int:
        return super().steps(client) if self.by_steps else self.run.config.calibration_steps

    def add(self, update: Update) -> list[list[int]]:
        self.calibration_sums.add(update.upload, self.weight(update.client))
        return []

    def close(self) -> None:
        """Change the initial state, and send the fixed tensors with messages from now on."""
        fixed, changed = self.calibration_sums.close()
        self.run.state.tensors |= changed
        self.run.message_builder.keep_fixed(fixed)
