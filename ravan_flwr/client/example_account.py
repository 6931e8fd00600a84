"""Account for what a client's examples have spent in a run, and refuse what would exceed epsilon.

The account lies in the node's state, and is there before a round's training begins: what was
counted may never have left, never the other way round. Flower forgets that state when a node is
started again, and stores it only after a reply has left. So the server says in each message how
often it has asked the client before; where that is more than the account says, it is believed.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from logging import DEBUG, INFO, getLogger
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.account_book import Entry, opened_book
from ravan_flwr.client.on_device import is_on_a_device
from ravan_flwr.config.run_config import Config
from ravan_flwr.privacy.account import LEAST, Releases, epsilon_of_all
from ravan_flwr.privacy.example_mechanism import StepNoise

log = getLogger(__name__)

ACCOUNT = "privacy-account"  # the record
MOST_ROUNDS = 1_000_000  # that a run has


class SpentError(ValueError):
    """Say that a client trains no further, since its epsilon would be exceeded."""


@dataclass(frozen=True)
class ExampleAccount:
    """Hold what a client has released in a run."""

    rounds: int = 0
    releases: tuple[Releases, ...] = ()

    @classmethod
    def find(cls, state: RecordDict, mark: str) -> "ExampleAccount":
        """Read a run's account from a node's state; an empty one if it is missing or damaged."""
        record = state.get(ACCOUNT)
        return cls.among([record] if isinstance(record, ConfigRecord) else [], mark)

    @classmethod
    def among(cls, entries: Sequence[Entry], mark: str) -> "ExampleAccount":
        """Read the one that has most rounds of a run, of those that are not damaged."""
        accounts = [cls()]
        for entry in entries:
            if entry.get("run") == mark:
                try:
                    accounts.append(_read(entry))
                except (KeyError, TypeError, ValueError) as error:
                    log.warning("this client's account is of no use: %s", error)
        return max(accounts, key=lambda account: account.rounds)

    def entry(self, mark: str) -> Entry:
        """Write it as an entry of a book."""
        return {
            "run": mark,
            "rounds": self.rounds,
            "multipliers": [one.multiplier for one in self.releases],
            "rates": [one.rate for one in self.releases],
            "numbers": [one.number for one in self.releases],
        }

    def after(self, rounds: int, each: Releases) -> "ExampleAccount":
        """Return the account with so many further rounds of that many releases each."""
        if not rounds:
            return self
        more = each._replace(number=each.number * rounds)
        kinds = {(one.multiplier, one.rate): one for one in self.releases}
        there = kinds.get((more.multiplier, more.rate))
        if there is not None:
            more = more._replace(number=there.number + more.number)
        kinds[more.multiplier, more.rate] = more
        return ExampleAccount(self.rounds + rounds, tuple(kinds.values()))


def take_part(
    state: RecordDict,
    mark: str,
    config: Config,
    rate: float,
    message: Mapping[str, Any],
    partition: int,
) -> tuple[StepNoise, bool]:
    """Count a round in the node's book; return its noise, and whether rounds were missing.

    SpentError, and the account as it was, if the round would exceed epsilon.
    """
    noise = noise_of(config, message)
    each = Releases(noise.multiplier, rate, config.local_steps or 0)
    told = _earlier_in(message)
    with opened_book(state, ACCOUNT, mark, partition) as book:
        account, missing = _caught_up(ExampleAccount.among(book.entries, mark), told, each)
        after = account.after(1, each)
        _check(config, account, after)
        book.enter(after.entry(mark))
    return noise, missing


def _caught_up(account: ExampleAccount, told: int, each: Releases) -> tuple[ExampleAccount, bool]:
    """Count rounds that the server says there were; return whether there are such."""
    missing = max(0, told - account.rounds)
    if missing:
        # In one process the record says it of all of them (`recounted`).
        log.log(
            INFO if is_on_a_device() else DEBUG,
            "this client's account has %d rounds, and the server has asked it in %d: it counts "
            "all of these, as after a restart or in a run that goes on",
            *(account.rounds, told),
        )
    return account.after(missing, each), bool(missing)


def noise_of(config: Config, message: Mapping[str, Any]) -> StepNoise:
    """Read the noise of the run: as set, or as the server has calibrated it to epsilon."""
    multiplier = config.noise_multiplier or message.get("noise-multiplier")
    if not isinstance(multiplier, float) or not LEAST <= multiplier < math.inf:
        raise ValueError(
            f"noise-multiplier = {multiplier!r} in the message: expected {LEAST:g} or more; start "
            "server and clients with one version"
        )
    assert config.clip_norm is not None  # of privacy=example it never adapts
    return StepNoise(multiplier, config.clip_norm)


def _check(config: Config, account: ExampleAccount, after: ExampleAccount) -> None:
    """Refuse a round that would exceed epsilon."""
    if config.epsilon is None:
        return
    then = epsilon_of_all(after.releases, config.delta)
    if then > config.epsilon:
        now = epsilon_of_all(account.releases, config.delta)
        raise SpentError(
            f"epsilon = {config.epsilon:g}: after {account.rounds} rounds its examples have spent "
            f"{now:.4g}, and one more would take that to {then:.4g}"
        )


def _earlier_in(message: Mapping[str, Any]) -> int:
    told = message.get("earlier-rounds")
    if type(told) is not int or not 0 <= told <= MOST_ROUNDS:
        raise ValueError(
            f"earlier-rounds = {told!r} in the message: expected a number of rounds, {MOST_ROUNDS} "
            "at most; start server and clients with one version"
        )
    return told


def _read(record: Entry) -> ExampleAccount:
    parts: list[Any] = [record[name] for name in ("multipliers", "rates", "numbers")]
    releases = tuple(Releases(*one) for one in zip(*parts, strict=True))
    sound = all(
        one.multiplier >= LEAST and 0 < one.rate <= 1 and type(one.number) is int and one.number > 0
        for one in releases
    )
    rounds = record["rounds"]
    if not sound or type(rounds) is not int or rounds < 1:
        raise ValueError(f"it has {rounds!r} rounds and releases {releases}")
    return ExampleAccount(rounds, releases)
