"""Rounds with `privacy=example`, and the server's account of each client's privacy budget.

Each client keeps its own account and refuses to train if its epsilon would be exceeded
(account.py). The server counts how often it has asked each client, which is at least as
often as the client took part. The count is on disk (`privacy.json`) before messages are sent. With
it the server reports the largest epsilon, does not ask clients that are out of budget, ends the run
if too few clients remain, and informs a restarted client of its count. Updates are private already,
so everything else is as in a plain round.

All clients use the same noise. Without `noise-multiplier` it is the least noise that keeps the
client with the fewest examples within epsilon, if that client trains in every round. Clients whose
budget fraction does not allow the method are never asked, and do not count.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from logging import getLogger
from typing import Any, Literal, NamedTuple, cast

from flwr.app import Message
from pydantic import NonNegativeInt

from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.example_privacy.gradients import check_trained
from ravan_flwr.extras.example_privacy.steps import sampling_rate
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.privacy.account import find_epsilon
from ravan_flwr.runs.record import PrivacyRecord, RoundRecord
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.federation import Federation
from ravan_flwr.server.privacy_budget import CLOSE, Account, PrivacyBudget, Rate, Rounds
from ravan_flwr.server.releases import Release
from ravan_flwr.server.round import Limits, Round, Sent
from ravan_flwr.server.update import Update, as_value_error, open_reply, read_refusal, within
from ravan_flwr.training.adapted_model import AdaptedModel

log = getLogger(__name__)


class TimesAsked(NamedTuple):
    """The number of rounds in which a client was asked to train."""

    rate: Rate  # the largest sampling rate of its examples in these rounds
    rounds: Rounds


NEVER = TimesAsked(0.0, 0)


class ExampleAccount(Account):
    """The account of `privacy=example`, with the times that each partition was asked."""

    unit: Literal["example"]
    asked: dict[NonNegativeInt, TimesAsked]


class ExampleBudget(PrivacyBudget):
    """The account of `privacy=example`: count how often each client was asked to train."""

    privacy, account = "example", ExampleAccount

    def _open(self, before: Mapping[str, Any]) -> None:
        self.steps = self.config.local_steps or 0
        entries = before.get("asked", {})
        self.counts = {int(p): TimesAsked(rate, rounds) for p, (rate, rounds) in entries.items()}
        self._closed: set[int] = set()  # partitions that refused to train further
        self.ended = False  # too few of the connected clients had room when a round began
        self._eligible: Callable[[], list[RegisteredClient]] = list  # clients that can train

    def begin(
        self, registry: ClientRegistry, can_train: Callable[[float], bool], rounds: int
    ) -> None:
        self._eligible = lambda: [
            client for client in registry.clients.values() if can_train(client.budget_fraction)
        ]
        clients = self._eligible() or list(registry.clients.values())
        min_examples, rate = (choose(map(self.rate, clients)) for choose in (min, max))
        self.calibrate(rate, rounds * self.steps)
        if self.ends_after(0) and not self.counts:
            raise self.epsilon_too_small(self._epsilon(TimesAsked(min_examples, 1)))
        log.info(
            "privacy=example: noise multiplier %.4g, clip norm %g, %d steps a round, each example "
            "in a step's batch with probability %.4g to %.4g; epsilon %.3f so far, %.3f for a "
            "client that trains in each of %d more rounds, delta %g",
            *(self.multiplier, self.config.clip_norm, self.steps, min_examples, rate, self.epsilon),
            *(self._epsilon(TimesAsked(rate, self.rounds + rounds)), rounds, self.delta),
        )
        max_examples = max(client.examples for client in clients)
        self.warn_of_delta(max_examples, f"clients of {max_examples} examples: one of these")

    def rate(self, client: RegisteredClient) -> float:
        """Return the sampling rate of a client's examples."""
        return sampling_rate(self.config.batch_size, client.examples)

    @property
    def rounds(self) -> int:
        return max((times.rounds for times in self.counts.values()), default=0)

    @property
    def epsilon(self) -> float:
        """Return the largest epsilon that a client has spent.

        It is not computed for clients that another client exceeds in both rate and rounds.
        """
        largest, rate = 0.0, 0.0
        rounds_first = sorted(self.counts.values(), key=lambda times: times[::-1], reverse=True)
        for times in rounds_first:
            if times.rate > rate:
                largest, rate = max(largest, self._epsilon(times)), times.rate
        return largest

    def with_room(
        self, clients: Sequence[RegisteredClient], further: int = 1
    ) -> list[RegisteredClient]:
        """Return the clients that stay within epsilon if they train in `further` rounds."""
        open_ = [client for client in clients if client.partition_id not in self._closed]
        if self._limit is None or not open_:
            return open_
        after = {client.partition_id: self._after(client, further) for client in open_}
        worst = TimesAsked(
            max(a.rate for a in after.values()), max(a.rounds for a in after.values())
        )
        if not self.exceeds(self._epsilon(worst)):  # one computation instead of one per client
            return open_
        return [
            client
            for client in open_
            if not self.exceeds(self._epsilon(after[client.partition_id]))
        ]

    def spend(self, clients: Iterable[RegisteredClient]) -> dict[int, int]:
        """Count one more round for these clients, on disk; return their earlier rounds."""
        chosen = list(clients)
        earlier = {
            client.partition_id: self.counts.get(client.partition_id, NEVER).rounds
            for client in chosen
        }
        for client in chosen:
            self.counts[client.partition_id] = self._after(client, 1)
        self._write(self.as_record() | {"asked": {str(k): [*v] for k, v in self.counts.items()}})
        return earlier

    def close(self, client: RegisteredClient) -> None:
        """Note that a client has refused to train further."""
        self._closed.add(client.partition_id)

    def as_record(self) -> dict[str, Any]:
        return {"unit": "example", **super().as_record()}

    def ends_after(self, rounds: int) -> bool:
        """Return whether too few clients may stay within epsilon after `rounds` further rounds.

        The draw is not known: each round may draw clients that then have no room left.
        """
        if self.ended or not (clients := self._eligible()):
            return self.ended
        now, later = (len(self.with_room(clients, number)) for number in (1, rounds + 1))
        drawn = rounds * self.config.num_asked(len(clients))
        return max(later, now - drawn) < self.config.min_replies

    def _after(self, client: RegisteredClient, further: int) -> TimesAsked:
        before = self.counts.get(client.partition_id, NEVER)
        return TimesAsked(max(before.rate, self.rate(client)), before.rounds + further)

    def _epsilon(self, times: TimesAsked) -> float:
        return find_epsilon(self.multiplier, times.rate, self.delta, times.rounds * self.steps)

    @classmethod
    def _problems(
        cls, content: Mapping[str, Any], records: list[RoundRecord], config: Config
    ) -> Iterator[str]:
        """Yield also the clients that trained more often, or with more, than was counted."""
        yield from super()._problems(content, records, config)
        used = [client for record in records for client in record["clients"]]
        times = Counter(client["partition-id"] for client in used)
        for client in used:
            of, rate = client["partition-id"], sampling_rate(config.batch_size, client["examples"])
            counted = TimesAsked(*content["asked"].get(of, NEVER))
            if counted.rate < rate * (1 - CLOSE) or counted.rounds < times[of]:
                expected = [rate, times[of]]
                yield f"asked has {[*counted]} of partition {of}, and the records {expected}"


class Counted(Release):
    """A round of clients within epsilon, whose updates are private already.

    The account counts each client before it is asked. A client may refuse to train.
    """

    budget = ExampleBudget

    def __init__(self, federation: Federation, round_: Round, state: Tensors) -> None:
        super().__init__(federation, round_, state)
        self.account = cast(ExampleBudget, federation.privacy)
        self._earlier: dict[int, int] = {}  # rounds before this one, by partition
        self._refused = 0

    @property
    def limits(self) -> Limits:
        none_left = self.account.ended or 0 < self._refused == len(self._earlier)
        return replace(super().limits, min_replies=0) if none_left else super().limits

    @staticmethod
    def check_model(model: AdaptedModel) -> None:
        check_trained(model.network, model.parameters())

    def draw(self) -> list[RegisteredClient]:
        """Sample clients within epsilon; count the round before messages are sent."""

        def with_room(clients: Sequence[RegisteredClient]) -> list[RegisteredClient]:
            able = self.account.with_room(not_asked := self.not_asked(clients))
            partitions = {client.partition_id for client in able}
            everyone = (client.partition_id for client in not_asked)
            self.round.log.out_of_budget = [one for one in everyone if one not in partitions]
            if not self._earlier and len(able) < self.config.min_replies <= len(clients):
                # Clients with room may be disconnected: the run ends with its result all the same.
                self.account.ended = True
                return []
            return able

        chosen = self.federation.sampler.sample(self.round.grid, self.round.log, with_room)
        self._earlier |= self.account.spend(chosen)
        return chosen

    def address(self, message: Message, client: RegisteredClient) -> None:
        config = message.content.config_records["config"]
        config["noise-multiplier"] = self.account.multiplier
        config["earlier-rounds"] = self._earlier[client.partition_id]

    def read(self, message: Message, sent: Sent) -> Update:
        if reason := read_refusal(message, self.round.number):
            self._refused += 1
            self.account.close(sent.client)
            raise ValueError(f"it trains no further: {plain(reason)}")
        with as_value_error():
            metrics, _ = open_reply(message, sent.number)
            if within(metrics, "recounted", 0, 1):
                self.round.log.recounted.append(sent.client.partition_id)  # also if it is rejected
        return super().read(message, sent)

    def close(self) -> Tensors | None:
        """Log what was spent, then return what the sums make."""
        spent = self.account.as_record() | {"clip-norm": self.config.clip_norm}
        self.round.log.private = cast(PrivacyRecord, spent)
        return super().close() if self.round.log.clients else None
