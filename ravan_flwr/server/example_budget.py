"""Keep what each client's examples have spent, as far as the server knows (`privacy=example`).

Each client accounts for itself and refuses to train when its epsilon would be exceeded
(client/example_account.py). The server counts beside it how often it has asked each one, which is
at least as often as it took part, and on disk (`privacy.json`) before the messages leave. By that
it tells the largest epsilon, leaves clients alone that have nothing left, ends the run when too few
have, and tells a client that was started again how often it was asked.

The noise is one for all. Without `noise-multiplier` it is the least with which the client of fewest
examples stays within epsilon, were it to train in every round.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from logging import getLogger
from typing import Any, NamedTuple

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.privacy.account import epsilon_of, multiplier_for
from ravan_flwr.runs.console import count
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.privacy_budget import (
    CLOSE,
    MOST_RELEASES,
    NAME,
    Records,
    agree,
    read_account,
    times_used,
)
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.training.private_steps import sampling_rate

log = getLogger(__name__)


class TimesAsked(NamedTuple):
    """Count the rounds in which a client was asked to train."""

    rate: float  # the largest with which its examples were drawn
    rounds: int


NEVER = TimesAsked(0.0, 0)


class ExampleBudget:
    """Say what clients have spent, and which of them have room for a further round.

    `before` is what the file said when a run went on, and `write` writes it.
    """

    def __init__(
        self,
        config: Config,
        write: Callable[[dict[str, Any]], None],
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.config, self._write = config, write
        self.delta, self._limit = config.delta, config.epsilon
        self.steps = config.local_steps or 0
        self.multiplier = float(before["noise-multiplier"]) if before else 0.0
        self.asked: dict[int, TimesAsked] = {}
        for partition, (rate, rounds) in (before or {}).get("asked", {}).items():
            self.asked[int(partition)] = TimesAsked(rate, rounds)
        self._closed: set[int] = set()  # partitions that said themselves that they have no room
        self._registry: ClientRegistry | None = None

    @classmethod
    def of(
        cls, config: Config, directory: RunDirectory, start: ResumePoint
    ) -> "ExampleBudget | None":
        """Open a run's account; None if it is not one with privacy of examples."""
        if config.privacy != "example":
            return None
        before = read_account(directory, start, partial(_problems, config=config))
        return cls(config, partial(directory.write_json, NAME), before)

    def begin(self, registry: ClientRegistry, rounds: int) -> None:
        """Fix the noise of a new run; tell what the run may spend."""
        self._registry = registry
        members = list(registry.members.values())
        rate = max(map(self.rate, members))
        if not self.multiplier:
            self.multiplier = self.config.noise_multiplier or multiplier_for(
                self._limit or 0.0, rate, self.delta, rounds * self.steps
            )
        if self.is_spent and not self.asked:
            least = min(map(self.rate, members))
            takes = self._epsilon(TimesAsked(least, 1))
            raise ValueError(
                f"epsilon = {self._limit:g}: one round takes {takes:.4g} "
                f"at least with noise-multiplier = {self.multiplier:g}, expected room for one at "
                f"{max(1, self.config.min_replies)} clients; raise the one or the other"
            )
        self._introduce(members, rate, rounds)

    def rate(self, member: RegisteredClient) -> float:
        """Return the rate with which a client draws its examples."""
        return sampling_rate(self.config.batch_size, member.examples)

    @property
    def epsilon(self) -> float:
        """Return what the client has spent that has spent most."""
        return self._largest(self.asked.values())

    def with_room(
        self, members: Sequence[RegisteredClient], further: int = 1
    ) -> list[RegisteredClient]:
        """List those that stay within epsilon if they train in so many further rounds."""
        open_ = [member for member in members if member.partition_id not in self._closed]
        if self._limit is None or not open_:
            return open_
        after = {m.partition_id: self._after(m, further) for m in open_}
        worst = TimesAsked(
            max(a.rate for a in after.values()), max(a.rounds for a in after.values())
        )
        if self._epsilon(worst) <= self._limit:  # of many clients few have to be looked at
            return open_
        return [m for m in open_ if self._epsilon(after[m.partition_id]) <= self._limit]

    def spend(self, members: Iterable[RegisteredClient]) -> dict[int, int]:
        """Count one round more for these, on disk when this returns; give the rounds before it."""
        chosen = list(members)
        earlier = {m.partition_id: self.asked.get(m.partition_id, NEVER).rounds for m in chosen}
        for member in chosen:
            self.asked[member.partition_id] = self._after(member, 1)
        self._write(self.told() | {"asked": {str(k): [*v] for k, v in self.asked.items()}})
        return earlier

    def close(self, member: RegisteredClient) -> None:
        """Note that a client has refused to train further."""
        self._closed.add(member.partition_id)

    def told(self) -> dict[str, Any]:
        """Say what was spent, as the records and the summary have it."""
        return {
            "unit": "example",
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise-multiplier": self.multiplier,
        }

    # As a limit of the run.

    def add(self, record: RoundRecord) -> None:
        """Count nothing: `spend` has, before the round's messages left."""

    @property
    def is_spent(self) -> bool:
        """Tell whether too few clients have room for a further round."""
        return self._too_few_after(0)

    @property
    def is_last(self) -> bool:
        """Tell whether too few will have room after the round that begins, which asks all."""
        members = self._registry.members if self._registry else ()
        return self.config.clients_per_round >= len(members) and self._too_few_after(1)

    def tell(self, number: int) -> None:
        """Log why that round is not held."""
        log.info(
            "epsilon: round %d needs %s with room for it, and fewer have any; the run ends here",
            *(number, count(max(1, self.config.min_replies), "client")),
        )

    def _too_few_after(self, rounds: int) -> bool:
        if self._registry is None:
            return False
        members = list(self._registry.members.values())
        return len(self.with_room(members, rounds + 1)) < max(1, self.config.min_replies)

    def _after(self, member: RegisteredClient, further: int) -> TimesAsked:
        before = self.asked.get(member.partition_id, NEVER)
        return TimesAsked(max(before.rate, self.rate(member)), before.rounds + further)

    def _epsilon(self, asked: TimesAsked) -> float:
        return epsilon_of(self.multiplier, asked.rate, self.delta, asked.rounds * self.steps)

    def _largest(self, asked: Iterable[TimesAsked]) -> float:
        """Return the largest epsilon, without working out those that another one exceeds."""
        largest, rate = 0.0, 0.0
        for one in sorted(asked, key=lambda one: (one.rounds, one.rate), reverse=True):
            if one.rate > rate:
                largest, rate = max(largest, self._epsilon(one)), one.rate
        return largest

    def _introduce(self, members: Sequence[RegisteredClient], rate: float, rounds: int) -> None:
        """Log what protects the examples, and what would be spent to the end."""
        log.info(
            "privacy=example: noise multiplier %.4g, clip norm %g, %d steps a round, each example "
            "in a step's batch with probability %.4g to %.4g; epsilon %.3f so far, %.3f for a "
            "client that trains in every round of %d, delta %g",
            *(self.multiplier, self.config.clip_norm, self.steps),
            *(min(map(self.rate, members)), rate, self.epsilon),
            *(self._epsilon(TimesAsked(rate, rounds)), rounds, self.delta),
        )
        most = max(member.examples for member in members)
        if self.delta * most >= 1:
            log.warning(
                "delta=%g with clients of %d examples: one of these may be given away whole; set "
                "it below %.1g",
                *(self.delta, most, 1 / most),
            )


def _problems(before: Mapping[str, Any], records: Records, config: Config) -> Iterator[str]:
    """List the values of the file that are not as a run writes them, those first that others need.

    Epsilon follows from the others, which the settings and the records have as well.
    """
    if before.get("unit") != "example" or before.get("delta") != config.delta:
        yield f"unit = {before.get('unit')!r}, delta = {before.get('delta')!r}"
    multiplier = before.get("noise-multiplier")
    if not isinstance(multiplier, int | float) or not 0 < multiplier < math.inf:
        yield f"noise-multiplier = {multiplier!r}"
    if config.noise_multiplier not in (None, multiplier):
        yield f"noise-multiplier = {multiplier!r}, and the run has {config.noise_multiplier!r}"
    asked = before.get("asked")
    if not isinstance(asked, dict):
        yield f"asked = {asked!r}"
        return
    for partition, one in asked.items():
        if not (partition.isdecimal() and _is_asked(one)):
            yield f"asked has {one!r} of partition {partition!r}"
    times = times_used(records)
    for client in (client for record in records for client in record["clients"]):
        of, rate = client["partition-id"], sampling_rate(config.batch_size, client["examples"])
        counted = TimesAsked(*asked.get(str(of), NEVER))
        if counted.rate < rate * (1 - CLOSE) or counted.rounds < times[of]:
            yield f"asked has {[*counted]} of partition {of}, and the records {[rate, times[of]]}"
    spent = ExampleBudget(config, lambda _: None, before).epsilon
    if not agree(before.get("epsilon"), spent):
        yield f"epsilon = {before.get('epsilon')!r}, and what was asked spends {spent!r}"


def _is_asked(one: object) -> bool:
    """Tell whether it is a rate and a number of rounds."""
    if not isinstance(one, list) or len(one) != 2 or type(one[1]) is not int:
        return False
    return isinstance(one[0], int | float) and 0 < one[0] <= 1 and 1 <= one[1] <= MOST_RELEASES
