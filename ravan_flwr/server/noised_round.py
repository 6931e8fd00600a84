"""Hold a round of `privacy=client` with `secure-aggregation=true`: clients add noise in shares.

The cohort is drawn as in any private round, and uploads are masked as in any secure one. Of n
clients each clips its own change and adds 1/n of the noise (the variance), so that the server sees
no sum without at least two thirds of it. It adds what is missing: whoever drops out, what is
released has the noise of a private round, neither more nor less. docs/privacy.md has the proof.
"""

import math
from collections import Counter
from collections.abc import Sequence
from logging import getLogger
from typing import cast

import numpy as np
import torch
from flwr.app import ArrayRecord, Message
from flwr.serverapp import Grid

from ravan_flwr.messages.pieces import SEEN
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.privacy.expected import expected_clients
from ravan_flwr.privacy.mechanism import adapted, moved_by
from ravan_flwr.privacy.noise import gaussian
from ravan_flwr.runs.record import Spent
from ravan_flwr.secure.noised import ROOM, NoiseShares
from ravan_flwr.secure.schedule import Schedule, make_schedule
from ravan_flwr.secure.server import UnmaskedSum
from ravan_flwr.server.privacy_budget import PrivacyBudget
from ravan_flwr.server.private_round import able_members, drawn_cohort, here_now
from ravan_flwr.server.round import Run
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.server.secure_round import SecureRound
from ravan_flwr.training.masked import WITHIN, noised_parts, parts_of, rows_by_tensor

log = getLogger(__name__)


class NoisedRound(SecureRound):
    """Hold a training round in which the server sees sums with noise in them alone."""

    def __init__(self, number: int, run: Run, budget: PrivacyBudget, norm: float) -> None:
        super().__init__(number, run)
        self.budget, self.norm = budget, norm
        self.members = able_members(run, self.method)
        self.noise = budget.noise(len(self.members))
        bits = self.noise.of_bits if self.noise.adaptive else 0.0
        self.shares = NoiseShares(norm, self.noise.of_changes, bits)

    def choose(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        """Draw a cohort and prepare it; the account is on disk before anybody is asked to train."""
        asked = super().choose(sampler, grid)
        if self.why:
            self.budget.spend()
            return []
        schedule = self.secure.schedule
        self.budget.spend([member.partition_id for member in asked], schedule.shown)
        return asked

    def _drawn(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        sampler.able(grid, self.round_log)  # notes who is left out
        here = here_now(self, grid)
        number = sum(map(here.can_be_asked, self.members))
        # Whether a round is held follows from who is here, never from who is drawn.
        self.why = self.budget.why_not_masked(number)
        if self.why:
            return []
        return drawn_cohort(self, self.members, here, self.budget.rate)

    def _schedule(self, members: Sequence[RegisteredClient]) -> Schedule:
        """List all rows for all: noise goes to whatever anybody could have trained."""
        config = self.run.config
        parts = noised_parts(self.method, self.run.state.tensors, self.shares)
        rows = np.ones(sum(part.rows for part in parts), bool)
        return make_schedule(
            self.grid.run.run_id, self.number, config.secure_minimum, parts,
            {member.partition_id: rows for member in members}, self._given(), self.shares,
        )  # fmt: skip

    def _message(self, kind: str, member: RegisteredClient, pieces: ArrayRecord) -> Message:
        """Tell a client first what was seen of it: it may have lost its account."""
        message = super()._message(kind, member, pieces)
        if kind == "keys":
            seen = self.budget.seen.get(member.partition_id, 0.0)
            message.content.config_records["config"][SEEN] = seen
        return message

    def _heads_of(self, member: RegisteredClient) -> list[list[int]]:
        parts = parts_of(self.method, self.run.state.tensors, 1.0)
        return sums_changes(self.method).heads_of(rows_by_tensor(parts, self._wanted(member)))

    def grace(self, grid: Grid) -> float | None:
        """Wait for each client as long as for any other: none decides whether another counts."""
        del grid
        return math.inf

    def close(self) -> None:
        """Unmask the sum, add the rest of the noise, and take the next state."""
        self.round_log.private = cast(Spent, self.budget.told() | {"clip-norm": self.norm})
        super().close()

    def _take_opened(self, opened: UnmaskedSum) -> None:
        """Take the state that the noised sums make, and the next clip norm."""
        state = self.run.state.tensors
        alive = int(self.secure.alive.sum())
        missing = math.sqrt(1 - alive / self.secure.number)  # of the noise's deviation
        deviation = missing * self.noise.of_changes * self.norm
        sums = {
            name: torch.from_numpy(opened.means[name]).view_as(old) + gaussian(old.shape, deviation)
            for name, old in state.items()
        }
        bits = self._bits_in(opened, missing)
        self._check(sums)
        shares = Counter(member.share for member in self.members)
        expected = expected_clients(self.method, state, shares, self.budget.rate)
        new = {name: moved_by(old, sums[name], expected[name]) for name, old in state.items()}
        if self.noise.adaptive:
            self.norm = adapted(self.norm, bits, self.noise.clients)
        self.run.state.take(new, self.method.frozen_tensors)

    def _bits_in(self, opened: UnmaskedSum, missing: float) -> float:
        """Read the sum of the clients' bits, each a half or less a half, with all of its noise."""
        if not self.noise.adaptive:
            return 0.0
        scale = self.noise.of_bits / (self.noise.of_changes * self.norm)
        seen = float(opened.means[WITHIN][0, 0]) * scale
        return seen + float(gaussian([1], missing * self.noise.of_bits))

    def _check(self, sums: Tensors) -> None:
        """Refuse sums that clipped changes and noise cannot have made.

        It looks at what is released: a check of sums with less noise would tell more.
        """
        norm = math.hypot(*(float(tensor.norm()) for tensor in sums.values()))
        numbers = sum(tensor.numel() for tensor in sums.values())
        noise = self.noise.of_changes * (math.sqrt(numbers) + ROOM)
        most = self.norm * (self.secure.number + noise)
        if norm > most:
            raise ValueError(
                f"the noised sum has a norm of {norm:.3g}, expected {most:.3g} at most: somebody "
                "sent what is not masked or clipped as agreed"
            )
