"""Hold a round of `privacy=client`: a drawn cohort, clipped changes, noise, and the account first.

Which clients train is drawn from the system's entropy, one by one, from all members: those that
are away or silent are drawn as well and count as zero, and nothing is divided by fewer. The round
waits for each client as long as for any other, so that none decides whether another counts.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from logging import getLogger
from typing import NamedTuple, cast

from flwr.app import MessageType
from flwr.serverapp import Grid
from torch import Tensor

from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Method, Tensors, split_classifier
from ravan_flwr.methods.tensors import sum_of_squares
from ravan_flwr.privacy.expected import expected_clients
from ravan_flwr.privacy.mechanism import FIRST_NORM, ClippedSum, Noise
from ravan_flwr.privacy.noise import happens
from ravan_flwr.runs.record import Spent
from ravan_flwr.secure.noised import LEAST_NORM, MOST_NORM
from ravan_flwr.server.aggregation import check_upload
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.replies import Reply
from ravan_flwr.server.round import Run, TrainingRound
from ravan_flwr.server.sampling import Sampler

log = getLogger(__name__)

CLIP_NORM = "privacy/clip-norm"  # in the server's memory


def clip_norm_in(memory: Mapping[str, Tensor]) -> float:
    """Read the clip norm that a run goes on with; that of a new run if there is none."""
    if (kept := memory.get(CLIP_NORM)) is None:
        return FIRST_NORM
    norm = float(kept) if kept.numel() == 1 else math.nan
    if not LEAST_NORM <= norm <= MOST_NORM:
        raise ValueError(
            f"checkpoint: {CLIP_NORM} is {kept.tolist()}, expected one number from {LEAST_NORM:g} "
            f"to {MOST_NORM:g}; restore the checkpoint, or go back with resume=RUN@N"
        )
    return norm


def able_members(run: Run, method: Method) -> list[RegisteredClient]:
    """List all that may be drawn, connected or not, by partition."""
    able = (member for member in run.registry.members.values() if method.can_train(member.share))
    return sorted(able, key=lambda member: member.partition_id)


class Availability(NamedTuple):
    """Tell which nodes are connected, and which of them rest."""

    connected: set[int]
    resting: set[int]

    def can_be_asked(self, member: RegisteredClient) -> bool:
        """Tell whether a member can be asked now."""
        return member.node_id in self.connected - self.resting


def here_now(round_: TrainingRound, grid: Grid) -> Availability:
    """Find out who is here before anybody is drawn."""
    nodes = round_.run.registry.nodes
    here = {member.node_id for member in round_.run.registry.present(grid)}
    resting = {one for one in here if nodes[one].rests(MessageType.TRAIN, round_.number)}
    return Availability(here, resting)


def drawn_cohort(
    round_: TrainingRound, members: Sequence[RegisteredClient], here: Availability, rate: float
) -> list[RegisteredClient]:
    """Draw each member by itself, and return those that can be asked; the ledger has the others."""
    asked = []
    for member in (member for member in members if happens(rate)):
        if member.node_id not in here.connected:
            round_.round_log.reject(member, "it is not connected; its change counts as zero")
        elif member.node_id in here.resting:
            round_.round_log.resting.append(member.partition_id)
        else:
            asked.append(member)
    return asked


class PrivateSums:
    """Check uploads, and keep the sum of their clipped changes; what closes has noise in it."""

    def __init__(
        self, method: Method, state: Tensors, norm: float, expected: Mapping[str, Tensor]
    ) -> None:
        self.method, self.expected = method, expected
        self.clipped = ClippedSum(state, norm)

    @property
    def count(self) -> int:
        """Return how many uploads were accepted."""
        return self.clipped.count

    def offer(self, upload: Mapping[str, Tensor], share: float) -> None:
        """Add an upload of a client with that share; ValueError if it is not sound.

        Nothing is compared with other clients' uploads.
        """
        state, classifier = split_classifier(self.clipped.state)
        own = check_upload(self.method, upload, classifier, share)
        for name, tensor in upload.items():
            sum_of_squares(tensor, name)  # refuses what is not finite
        filled = self.method.expand_upload(own, state)
        self.clipped.add(filled | {name: upload[name] for name in classifier})

    def close(self, noise: Noise) -> Tensors:
        """Return the next state, noise included."""
        return self.clipped.release(noise, self.expected)


class PrivateRound(TrainingRound):
    """Hold a training round within the run's privacy budget."""

    def __init__(self, number: int, run: Run, budget: PrivacyBudget, norm: float) -> None:
        super().__init__(number, run)
        self.budget, self.norm = budget, norm
        self.least = 0  # a cohort may be empty; then noise alone is released
        self.members = able_members(run, self.method)
        self.noise = budget.noise(len(self.members))

    def choose(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        """Draw the cohort, and return those of it that can be asked."""
        sampler.able(grid, self.round_log)  # notes who is left out
        return drawn_cohort(self, self.members, here_now(self, grid), self.budget.rate)

    @property
    def enough(self) -> float:
        return math.inf  # all replies are waited for: no number of them is enough

    def grace(self, grid: Grid) -> float | None:
        del grid
        return math.inf

    def add(self, reply: Reply) -> list[list[int]]:
        upload = reply.trained.upload
        self.private_sums.offer(upload, reply.member.share)
        return self.method.heads_in(upload)

    @cached_property
    def private_sums(self) -> PrivateSums:
        """Return the sums, which open empty when the first reply is there."""
        state = self.run.state.tensors
        shares = Counter(member.share for member in self.members)
        expected = expected_clients(self.method, state, shares, self.budget.rate)
        return PrivateSums(self.method, state, self.norm, expected)

    def close(self) -> None:
        """Spend what the release takes, then make the next state."""
        self.budget.spend()
        sums = self.private_sums
        if not sums.count:
            log.warning("round %d: no change came, and noise alone is added", self.number)
        self.round_log.private = cast(Spent, self.budget.told() | {"clip-norm": self.norm})
        try:
            self.run.state.take(sums.close(self.noise), self.method.frozen_tensors)
        except ValueError as error:
            self.round_log.refused = str(error)
            log.warning("round %d has no effect, the state stays: %s", self.number, error)
        self.norm = sums.clipped.next_norm(self.noise)
        del self.private_sums
