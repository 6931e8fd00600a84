"""Choose what becomes of a round's sums: the method's next state as it is, or a private one.

A release decides who trains, reads an update, adds it up and takes the next state. `Release` is
that of a run without privacy; the others override what differs.
"""

import math
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
from ravan_flwr.server.aggregation import (
    FEWEST,
    Aggregate,
    moved,
    open_calibration,
    outgoing,
)
from ravan_flwr.server.replies import Update, read_trained
from ravan_flwr.specs import Scalar
from ravan_flwr.training.adapted_model import AdaptedModel

if TYPE_CHECKING:
    from ravan_flwr.server.privacy_budget import PrivacyBudget
    from ravan_flwr.server.round import Round

log = getLogger(__name__)

# By `privacy`: mean, noised, counted. They are imported when a run has them.
RELEASES = {
    "none": "ravan_flwr.server.release:Release",
    "client": "ravan_flwr.server.noised:Noised",
    "example": "ravan_flwr.extras.example_privacy:Counted",
}


def release_of(config: Config) -> "type[Release]":
    """Find the release of a run."""
    found: type[Release] = resolve_name(RELEASES[config.privacy])
    return found


class Release:
    """Take the method's next state of what clients upload."""

    budget: "ClassVar[type[PrivacyBudget] | None]" = None  # of what it spends
    kind: ClassVar[str] = MessageType.TRAIN  # of its messages
    gives_grace = True  # Does the straggler timeout count? Else every client is waited for.

    def __init__(self, round_: "Round") -> None:
        self.round, self.run = round_, round_.run

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        """Raise ValueError for a model of which it cannot release anything."""

    @property
    def enough(self) -> float:
        """Return how many good replies to training end the wait at once."""
        return self.run.config.clients_per_round

    @property
    def has_enough(self) -> bool:
        """Return whether as many replies were used as the round needs."""
        return len(self.round.round_log.clients) >= self.round.least

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Sample the clients that train in the round."""
        return self.run.sampler.sample(grid, self.round.round_log)

    def broadcast(self, share: float) -> Tensors:
        """Return what a client with that share of the budget is sent."""
        return outgoing(self.round.method, self.run.state.tensors, share)

    def settings(self, member: RegisteredClient) -> dict[str, Scalar]:  # noqa: ARG002
        """Return what a client's message says beside what all messages say."""
        return {}

    def steps(self, member: RegisteredClient) -> int:
        """Count the steps that a client takes in this round."""
        return self.run.steps(member)

    def weight(self, member: RegisteredClient) -> float:
        """Return an update's weight in a mean."""
        by_examples = self.run.config.weighting == "examples"
        return float(self.run.registry.examples(member)) if by_examples else 1.0

    def check(self, message: Message, member: RegisteredClient) -> Update:
        """Read a training reply of this round, of a node with the server's bases."""
        run, number = self.run, self.round.collector.answered.number
        sparsity = sparsity_of_round(run.config.shares_sent, number)
        classifier = run.state.tensors.get(CLASSIFIER)
        shapes = self.round.method.upload_shapes(member.share).values()
        most = sum(map(math.prod, shapes)) + (0 if classifier is None else classifier.numel())
        trained = read_trained(
            message, member, number, run.state.derived, wire_of_round(run.config.wire, number),
            most, sparsity[1], personal=run.method.personal is not None,
            with_loss=run.config.privacy == "none",
            with_seconds=run.config.privacy != "example",
        )  # fmt: skip
        if sparsity != WHOLE:  # it has what changed, since the state that its client was sent
            state = run.flight.versions.get(number, run.state.tensors)
            upload = moved(self.round.method, trained.upload, member.share, state)
            trained = replace(trained, upload=upload)
        if METHODS[run.config.method].pools:
            everyone = run.registry.members.values()
            member = replace(member, examples=sum(one.examples for one in everyone))
        bytes_up = num_bytes(message.content.array_records["arrays"])
        return replace(trained, member=member, bytes_up=bytes_up, steps=self.steps(member))

    # Where updates are read one by one.

    @cached_property
    def sums(self) -> Aggregate:
        """Return the sums, which open empty when the first reply is there."""
        return self.run.state.open_sums(self.round.method)

    def add(self, update: Update) -> list[list[int]]:
        """Add an update to the sums; return its heads, by layer. ValueError if it is not sound."""
        member, step = update.member, self.run.config.learning_rate * update.steps
        self.sums.offer(update.upload, member.share, self.weight(member), step)
        return self.round.method.heads_in(update.upload)

    def mean(self) -> Tensors:
        """Return what the sums make; ValueError if honest replies cannot have made it."""
        robust, count = self.run.config.robust, self.sums.count
        if robust != "none" and count < FEWEST:
            log.warning(
                "round %d: %d replies came, and weighting = %r changes nothing with fewer than %d",
                self.round.number, count, robust, FEWEST,
            )  # fmt: skip
        sums = self.sums
        del self.sums  # those of a robust round hold every reply
        return sums.close()

    def close(self) -> None:
        """Take the next state; ValueError, and no change, if the round has no effect."""
        mean = self.round.transport.mean()
        self.run.state.take(mean, self.round.method.frozen_tensors)


class Calibrated(Release):
    """Make the method's fixed tensors of what clients upload before the first round: round 0."""

    kind = f"{MessageType.TRAIN}.calibrate"

    def __init__(self, round_: "Round") -> None:
        super().__init__(round_)
        config, calibration = self.run.config, self.run.method.calibration
        assert calibration is not None
        self.everyone, self.by_steps = calibration.everyone, calibration.by_steps
        most = max(map(self.run.steps, self.run.registry.members.values()), default=0)
        step = config.calibration_learning_rate * most
        self.calibration_sums = open_calibration(
            calibration, config.max_update_norm, step, config.robust
        )
        if config.robust != "none":
            round_.least = max(round_.least, FEWEST)

    @property
    def enough(self) -> float:
        return math.inf if self.everyone else super().enough

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        choose = self.run.sampler.able if self.everyone else self.run.sampler.sample
        return choose(grid, self.round.round_log)

    def broadcast(self, share: float) -> Tensors:  # noqa: ARG002
        return self.run.state.tensors

    def steps(self, member: RegisteredClient) -> int:
        return super().steps(member) if self.by_steps else self.run.config.calibration_steps

    def add(self, update: Update) -> list[list[int]]:
        self.calibration_sums.add(update.upload, self.weight(update.member))
        return []

    def close(self) -> None:
        """Change the initial state; the fixed tensors travel from now on."""
        fixed, changed = self.calibration_sums.close()
        self.run.state.tensors |= changed
        self.run.mail.keep_fixed(fixed)
