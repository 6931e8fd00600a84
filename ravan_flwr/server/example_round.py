"""Hold a round of `privacy=example`: whoever is asked is counted first, and may refuse.

What comes back is private already, so that all else is as in any round.
"""

from collections.abc import Sequence
from functools import cached_property

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.messages.plain_text import plain
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.runs.record import Spent
from ravan_flwr.server.example_budget import ExampleBudget
from ravan_flwr.server.replies import Trained, refusal_in, within
from ravan_flwr.server.round import Run, TrainingRound
from ravan_flwr.server.sampling import Sampler
from ravan_flwr.specs import Scalar


class ExampleRound(TrainingRound):
    """Hold a training round with clients that have room for it in their epsilon."""

    def __init__(self, number: int, run: Run, budget: ExampleBudget) -> None:
        super().__init__(number, run)
        self.budget = budget
        self._earlier: dict[int, int] = {}  # rounds before this one, by partition
        self._refused = 0

    def choose(self, sampler: Sampler, grid: Grid) -> list[RegisteredClient]:
        """Sample among those with room, and count the round before anything is sent."""

        def with_room(members: Sequence[RegisteredClient]) -> list[RegisteredClient]:
            found = self.budget.with_room(members)
            kept = {member.partition_id for member in found}
            everyone = (member.partition_id for member in members)
            self.round_log.spent = [number for number in everyone if number not in kept]
            return found

        chosen = sampler.sample(grid, self.round_log, with_room)
        self._earlier = self.budget.spend(chosen)
        return chosen

    def settings(self, member: RegisteredClient) -> dict[str, Scalar]:
        return {
            "noise-multiplier": self.budget.multiplier,
            "earlier-rounds": self._earlier[member.partition_id],
        }

    @property
    def has_enough(self) -> bool:
        """Return whether enough replies were used, or all who were asked have refused."""
        all_refused = bool(self._earlier) and self._refused == len(self._earlier)
        return super().has_enough or all_refused

    def close(self) -> None:
        """Take the next state, and note what was spent."""
        self.round_log.private = self._spent
        if self.round_log.clients:
            super().close()

    def _read(self, message: Message, member: RegisteredClient) -> Trained:
        if reason := refusal_in(message, self.number):
            self._refused += 1
            self.budget.close(member)
            raise ValueError(f"it trains no further: {plain(reason)}")
        trained = super()._read(message, member)
        if within(message.content.metric_records["metrics"], "recounted", 0, 1):
            self.round_log.recounted.append(member.partition_id)
        return trained

    @cached_property
    def _spent(self) -> Spent:
        norm = self.run.config.clip_norm
        assert norm is not None  # of privacy=example it never adapts
        told = self.budget.told()
        return {
            "unit": told["unit"],
            "epsilon": told["epsilon"],
            "delta": told["delta"],
            "noise-multiplier": told["noise-multiplier"],
            "clip-norm": norm,
        }
