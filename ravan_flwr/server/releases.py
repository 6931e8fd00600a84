"""Releases: how the updates of a round become the next state.

The word is that of differential privacy: a release is what is made public of private updates.
`Release` is the method's own: its sums, and the server's optimiser. Other releases override what
differs (optional.py lists them).
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from logging import getLogger
from typing import ClassVar

from flwr.app import ArrayRecord, Message, MessageType

from ravan_flwr.config.keys import ROBUST
from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import WHOLE, sent_sparsely, sparsify, sparsity_of_round
from ravan_flwr.messages.wire import encode, wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER, Tensors, split_classifier
from ravan_flwr.optional import RELEASES, load
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import (
    Aggregate,
    CalibrationSums,
    check_upload,
    make_broadcast,
    rebase,
    upload_from_change,
)
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.round import Limits, Round, Sent
from ravan_flwr.server.update import Update, read_trained
from ravan_flwr.training.adapted_model import AdaptedModel

log = getLogger(__name__)


def release_class(config: Config) -> "type[Release]":
    """Return the class of a run's releases."""
    found: type[Release] = load(RELEASES[config.release])
    return found


def weigh_staleness(staleness: int) -> float:
    """Return the weight of an update that is `staleness` versions old."""
    return float((1 + staleness) ** -0.5)


class Release:
    """Release the mean of the updates, as the method makes it. One object serves one round.

    Args:
        federation: The parts of the run.
        round_: The round.
        state: The state that clients are sent in this round, dropped when the round has closed.
    """

    budget: ClassVar[type[PrivacyBudget] | None] = None  # the account of a private release
    message_type: ClassVar[str] = MessageType.TRAIN

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        self.federation, self.round, self.state = federation, round_, state
        self.config, self.method = federation.config, federation.method.in_round(round_.number)
        self._broadcasts: dict[float, ArrayRecord] = {}  # by budget fraction, as they travel

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError if no update of the model can be released."""

    @staticmethod
    def smallest_cohort(config: Config, partitions: int) -> int:  # noqa: ARG004
        """Return how many clients must be connected before a round begins."""
        return config.min_replies

    @property
    def limits(self) -> Limits:
        """Return how many replies the round needs, and how long it waits for more."""
        return replace(self.round.limits, enough=self.config.clients_per_round)

    # Before training.

    def draw(self) -> list[RegisteredClient]:
        """Choose the clients that train, among those that this round has not asked."""
        return self.federation.sampler.sample(self.round.grid, self.round.log, self.not_asked)

    def not_asked(self, clients: Sequence[RegisteredClient]) -> list[RegisteredClient]:
        """Return those of these clients that were sent no message in this round."""
        return [client for client in clients if client.node_id not in self.round.recipients]

    def write(self, clients: Iterable[RegisteredClient]) -> list[Message]:
        """Return a message with the broadcast for each of these clients."""
        messages, broadcasts = [], self._broadcasts
        for client in clients:
            # Most methods have one broadcast for all.
            fraction = client.budget_fraction if self.method.cuts_broadcast else 1.0
            if fraction not in broadcasts:
                broadcasts[fraction] = self.encode(self.broadcast(fraction))
            message = self.federation.message_builder.message(
                client, self.message_type, self.round.number, broadcasts[fraction], {}
            )
            self.address(message, client)
            messages.append(message)
        return messages

    def broadcast(self, fraction: float) -> Tensors:
        """Return the tensors that a client with that budget fraction is sent."""
        return make_broadcast(self.method, self.state, fraction)

    def address(self, message: Message, client: RegisteredClient) -> None:
        """Add to a message what only this client is sent."""

    def encode(self, tensors: Tensors) -> ArrayRecord:
        """Return tensors as the wire carries them: sparse and with fewer bits, as configured."""
        config, number = self.config, self.round.number
        density = sparsity_of_round(config.densities, number)[0]
        sparse = sparsify(tensors, density, sent_sparsely(self.method))
        random = generator(config.seed, "wire down", number)
        return to_record(encode(sparse, wire_of_round(config.wire, number), random))

    # While replies arrive: `read` checks everything about a reply, so that `add` cannot fail.

    def read(self, message: Message, sent: Sent) -> Update:
        """Return the update in a reply; raise ValueError with the reason to reject it."""
        client, fraction = sent.client, sent.client.budget_fraction
        staleness = self._count_versions_since(sent)
        update = self._decode(message, sent)
        self.check_form(update.upload, fraction)
        upload = self._apply_to_present_state(update.upload, sent)
        if METHODS[self.config.method].pools:  # each client trains on the examples of all
            everyone = self.federation.registry.clients.values()
            client = replace(client, examples=sum(each.examples for each in everyone))
        steps = self.steps(client)
        max_move = self.config.learning_rate * steps
        norms_if_alone = self.check_size(upload, fraction, max_move)
        return replace(
            update, client=client, upload=upload, staleness=staleness, steps=steps,
            max_move=max_move, norms_if_alone=norms_if_alone,
        )  # fmt: skip

    def _count_versions_since(self, sent: Sent) -> int:
        """Return how old the state is that a client was sent; raise ValueError if it is too old."""
        staleness, max_staleness = self.round.number - sent.number, self.config.max_staleness
        if max_staleness is not None and staleness > max_staleness:
            raise ValueError(
                f"its update is {staleness} versions old, expected at most max-staleness = "
                f"{max_staleness}"
            )
        return staleness

    def _decode(self, message: Message, sent: Sent) -> Update:
        """Return a reply's metrics, which are checked, and its tensors, which are not yet."""
        config, number = self.config, sent.number
        shapes = self.method.upload_shapes(sent.client.budget_fraction).values()
        max_values = sum(map(math.prod, shapes))
        if CLASSIFIER in self.state:
            max_values += self.state[CLASSIFIER].numel()
        return read_trained(
            message, sent.client, number, self.federation.state.fingerprint,
            wire_of_round(config.wire, number), max_values,
            sparsity_of_round(config.densities, number)[1],
            # A calibration, in round 0, trains no personal parameters.
            personal=self.federation.method.personal is not None and number > 0,
            with_loss=config.privacy == "none", with_seconds=config.privacy != "example",
        )  # fmt: skip

    def _apply_to_present_state(self, upload: Tensors, sent: Sent) -> Tensors:
        """Return the values that an upload of valid form gives to the present state."""
        method, fraction = self.method, sent.client.budget_fraction
        staleness = self.round.number - sent.number
        sent_state = self.round.versions[sent.number] if staleness else self.state
        if sparsity_of_round(self.config.densities, sent.number) != WHOLE:
            # It has changes, most of them zeros; the sums take values.
            upload = upload_from_change(method, upload, fraction, sent_state)
        if staleness:  # its change of an earlier state becomes one of the present state
            weight = weigh_staleness(staleness)
            upload = rebase(method, upload, fraction, sent_state, self.state, weight)
        return upload

    def check_form(self, upload: Tensors, fraction: float) -> None:
        """Raise ValueError if an upload has wrong names, shapes or types for that budget."""
        check_upload(self.method, upload, split_classifier(self.state)[1], fraction)

    def check_size(self, upload: Tensors, fraction: float, max_move: float) -> Mapping[str, float]:
        """Raise ValueError if an upload changes too much; return its `norms_if_alone`.

        `max_move` is how far the client's optimiser can move a number.
        """
        return self.sums.check(upload, fraction, max_move)

    def add(self, update: Update) -> None:
        """Add an update to the sums."""
        weight = self.federation.weight(update.client)
        self.sums.add(update.upload, weight, update.norms_if_alone, update.max_move)

    def heads_in(self, update: Update) -> list[list[int]]:
        """Return the heads that a client has trained, by layer."""
        return self.method.heads_in(update.upload)

    def steps(self, client: RegisteredClient) -> int:
        """Return how many local steps a client takes in this round."""
        return self.federation.steps(client)

    # When the round closes.

    @cached_property
    def sums(self) -> Aggregate:
        """Return the round's sums, empty before the first reply."""
        return self.federation.state.open_sums(self.method)

    def close(self) -> Tensors | None:
        """Return what the sums make, to which the server's optimiser steps; None: no step.

        Raise ValueError if the round has no effect.
        """
        robust, sums = self.config.robust, self.sums
        del self.sums  # in a robust round they hold every reply
        if robust != "none" and sums.count < ROBUST[robust]:
            log.warning(
                "round %d: %d replies came, and weighting = %r changes nothing with fewer than %d",
                self.round.number, sums.count, robust, ROBUST[robust],
            )  # fmt: skip
            return None  # with a step, the optimiser's momentum would move the state
        return sums.close()


class Calibrated(Release):
    """Round 0: make the method's fixed tensors from the clients' uploads."""

    message_type = f"{MessageType.TRAIN}.calibrate"

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        super().__init__(federation, round_, state)
        assert federation.method.calibration is not None
        self.calibration = federation.method.calibration

    @property
    def limits(self) -> Limits:
        limits = self.round.limits if self.calibration.all_clients else super().limits
        # A robust statistic of fewer replies would leave the fixed tensors at zero.
        needed = max(limits.min_replies, ROBUST.get(self.config.robust, 0))
        # An asynchronous run may need more replies than `clients-per-round`.
        enough = max(needed, limits.enough)
        return replace(limits, min_replies=needed, quorum=needed, enough=enough)

    def draw(self) -> list[RegisteredClient]:
        if not self.calibration.all_clients:
            return super().draw()
        return self.not_asked(self.federation.sampler.eligible(self.round.grid, self.round.log))

    def broadcast(self, fraction: float) -> Tensors:  # noqa: ARG002
        return self.state

    def steps(self, client: RegisteredClient) -> int:
        by_steps = self.calibration.by_steps
        return super().steps(client) if by_steps else self.config.calibration_steps

    def check_form(self, upload: Tensors, fraction: float) -> None:  # noqa: ARG002
        self.sums.check_form(upload)

    def check_size(self, upload: Tensors, fraction: float, max_move: float) -> Mapping[str, float]:  # noqa: ARG002
        self.sums.check(upload)
        return {}  # of no tensor of the state

    def add(self, update: Update) -> None:
        self.sums.add(update.upload, self.federation.weight(update.client))

    def heads_in(self, update: Update) -> list[list[int]]:  # noqa: ARG002
        return []

    @cached_property
    def sums(self) -> CalibrationSums:  # type: ignore[override]  # it makes fixed tensors, no state
        config, federation = self.config, self.federation
        max_steps = max(map(federation.steps, federation.registry.clients.values()), default=0)
        max_move = config.calibration_learning_rate * max_steps
        return CalibrationSums(self.calibration, config.max_update_norm, max_move, config.robust)

    def close(self) -> None:
        """Change the initial state, and send the fixed tensors with messages from now on."""
        fixed, changed = self.sums.close()
        self.federation.state.tensors |= changed
        self.federation.message_builder.keep_fixed(fixed)
