"""Releases: how the updates of a round become the next state.

`Mean` is the method's own: its sums, and the server's optimiser. Other releases override what
differs (optional.py lists them).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from typing import ClassVar

from flwr.app import Message, MessageType

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import num_bytes
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import WHOLE, sparsity_of_round
from ravan_flwr.messages.wire import wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Tensors, split_classifier
from ravan_flwr.optional import RELEASES, load
from ravan_flwr.server.aggregation import (
    FEWEST,
    Aggregate,
    CalibrationSums,
    check_upload,
    moved,
    outgoing,
    rebased,
)
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.reply_collector import Sent
from ravan_flwr.server.round import Round
from ravan_flwr.server.update import Update, read_trained
from ravan_flwr.training.adapted_model import AdaptedModel

log = getLogger(__name__)


def release_class(config: Config) -> "type[Mean]":
    """Return the class of a run's releases."""
    found: type[Mean] = load(RELEASES[config.release])
    return found


def weight_of_staleness(staleness: int) -> float:
    """Return the weight of an update that is `staleness` versions old."""
    return float((1 + staleness) ** -0.5)


class Mean:
    """Release the mean of the updates, as the method makes it. One object serves one round.

    Args:
        federation: The parts of the run.
        round_: The round, whose limits a release may change.
        state: The state that clients are sent in this round, dropped when the round has closed.
    """

    budget: ClassVar[type[PrivacyBudget] | None] = None  # the account of a private release
    message_type: ClassVar[str] = MessageType.TRAIN

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        self.federation, self.round, self.state = federation, round_, state
        self.config, self.method = federation.config, round_.method

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError if no update of the model can be released."""

    @staticmethod
    def smallest_cohort(config: Config, partitions: int) -> int:  # noqa: ARG004
        """Return how many clients must be connected before a round begins."""
        return config.min_replies

    # Before training.

    def draw(self) -> list[RegisteredClient]:
        """Choose the clients that train."""
        return self.federation.sampler.sample(self.round.grid, self.round.log)

    def broadcast(self, fraction: float) -> Tensors:
        """Return the tensors that a client with that budget fraction is sent."""
        return outgoing(self.method, self.state, fraction)

    def address(self, message: Message, client: RegisteredClient) -> None:
        """Add to a message what only this client is sent."""

    # While replies arrive: `read` checks everything about a reply, so that `add` cannot fail.

    def read(self, message: Message, sent: Sent, version: Tensors, staleness: int) -> Update:
        """Return the update in a reply; raise ValueError with the reason to reject it.

        The client was sent `version`, the state `staleness` rounds ago.
        """
        update, fraction = self.opened(message, sent), sent.client.budget_fraction
        check_upload(self.method, update.upload, split_classifier(version)[1], fraction)
        upload = update.upload
        if sparsity_of_round(self.config.densities, sent.number) != WHOLE:
            upload = moved(self.method, upload, fraction, version)  # it has a change
        if staleness:
            weight = weight_of_staleness(staleness)
            upload = rebased(self.method, upload, fraction, version, self.state, weight)
        update = replace(update, upload=upload, staleness=staleness)
        return replace(update, norms=self.check(update))

    def opened(self, message: Message, sent: Sent) -> Update:
        """Return the decoded tensors and the metrics of a reply; the tensors are not checked."""
        federation, config, client = self.federation, self.config, sent.client
        classifier = self.state.get(CLASSIFIER)
        shapes = self.method.upload_shapes(client.budget_fraction).values()
        most = sum(map(math.prod, shapes)) + (0 if classifier is None else classifier.numel())
        update = read_trained(
            message, client, sent.number, federation.state.derived,
            wire_of_round(config.wire, sent.number), most,
            sparsity_of_round(config.densities, sent.number)[1],
            personal=federation.method.personal is not None,
            with_loss=config.privacy == "none", with_seconds=config.privacy != "example",
        )  # fmt: skip
        if METHODS[config.method].pools:
            everyone = federation.registry.clients.values()
            client = replace(client, examples=sum(each.examples for each in everyone))
        bytes_up = num_bytes(message.content.array_records["arrays"])
        return replace(update, client=client, bytes_up=bytes_up, steps=self.steps(client))

    def check(self, update: Update) -> Mapping[str, float]:
        """Raise ValueError if an update of the right form changes too much; return its norms."""
        step = self.config.learning_rate * update.steps
        return self.sums.check(update.upload, update.client.budget_fraction, step)

    def add(self, update: Update) -> list[list[int]]:
        """Add an update to the sums; return its heads, by layer."""
        weight = self.federation.weight(update.client)
        step = self.config.learning_rate * update.steps
        self.sums.add(update.upload, update.norms, weight, step)
        return self.method.heads_in(update.upload)

    def steps(self, client: RegisteredClient) -> int:
        """Return how many local steps a client takes in this round."""
        return self.federation.steps(client)

    # When the round closes.

    @cached_property
    def sums(self) -> Aggregate:
        """Return the round's sums, empty before the first reply."""
        return self.federation.state.open_sums(self.method)

    def mean(self) -> Tensors:
        """Return the state that the sums make; raise ValueError if the round has no effect."""
        robust, count = self.config.robust, self.sums.count
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
        self.federation.state.take(self.mean(), self.method.frozen_tensors)


class Calibrated(Mean):
    """Round 0: make the method's fixed tensors from the clients' uploads."""

    message_type = f"{MessageType.TRAIN}.calibrate"

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        super().__init__(federation, round_, state)
        config, calibration = self.config, federation.method.calibration
        assert calibration is not None
        self.all_clients, self.by_steps = calibration.all_clients, calibration.by_steps
        most = max(map(federation.steps, federation.registry.clients.values()), default=0)
        step = config.calibration_learning_rate * most
        self.calibration_sums = CalibrationSums(
            calibration, config.max_update_norm, step, config.robust
        )
        round_.asks_more = False
        if self.all_clients:
            round_.enough = math.inf
        if config.robust != "none":
            round_.least = round_.quorum = max(round_.least, FEWEST)

    def draw(self) -> list[RegisteredClient]:
        if not self.all_clients:
            return super().draw()
        return self.federation.sampler.eligible(self.round.grid, self.round.log)

    def broadcast(self, fraction: float) -> Tensors:  # noqa: ARG002
        return self.state

    def steps(self, client: RegisteredClient) -> int:
        return super().steps(client) if self.by_steps else self.config.calibration_steps

    def read(self, message: Message, sent: Sent, version: Tensors, staleness: int) -> Update:  # noqa: ARG002
        update = self.opened(message, sent)
        self.calibration_sums.check(update.upload)
        return update

    def add(self, update: Update) -> list[list[int]]:
        self.calibration_sums.add(update.upload, self.federation.weight(update.client))
        return []

    def close(self) -> None:
        """Change the initial state, and send the fixed tensors with messages from now on."""
        fixed, changed = self.calibration_sums.close()
        self.federation.state.tensors |= changed
        self.federation.message_builder.keep_fixed(fixed)
