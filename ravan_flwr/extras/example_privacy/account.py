"""Account on a device for its releases in a run, and refuse releases above a privacy budget.

The account is written before an upload is sent. So it may count a release that was never sent, but
never misses one that was. Flower starts a process for every message, gives each the node's state of
its start, and keeps the state of the process that ends last. A message that starts before a round
and ends after it would therefore remove the round from the node's state, as often as a server
sends such messages. So on a device every entry is also a line of a file that only this user can
write. The file survives a restart of the SuperNode; the node's state does not. To Flower a resumed
run is a new run. So the server sends with each round how many rounds it has counted before. If its
number is larger than the account's, the account takes that number.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import DEBUG, INFO, getLogger
from typing import Any, BinaryIO

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.on_device import is_on_a_device, locked_file, persistent_folder
from ravan_flwr.client.replay_guard import ACCOUNT
from ravan_flwr.config.node_config import Node
from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.example_privacy.gradients import StepNoise
from ravan_flwr.files import append
from ravan_flwr.privacy.account import LEAST_MULTIPLIER, Releases, find_total_epsilon

log = getLogger(__name__)

MAX_ROUNDS = 1_000_000  # of a run

Entry = Mapping[str, Any]


class AccountBook:
    """The entries of a run's account, locked against other processes."""

    def __init__(self, state: RecordDict, run: str, file: BinaryIO | None) -> None:
        self._state, self._run, self._file = state, run, file

    @property
    def entries(self) -> list[Entry]:
        """Return the last entries of node state and file: each may lack entries of the other."""
        record = self._state.get(ACCOUNT)
        entries: list[Entry] = [record] if isinstance(record, ConfigRecord) else []
        if self._file is not None:
            self._file.seek(0)
            entries += _read_last(self._file.read().splitlines())
        return [entry for entry in entries if entry.get("run") == self._run]

    def write_entry(self, **entry: Any) -> None:
        """Write an entry to node state and file; it is on disk when this returns."""
        entry["run"] = self._run
        self._state[ACCOUNT] = ConfigRecord(entry)
        if self._file is not None:
            # Begin a new line: the last one may be incomplete.
            append(self._file, b"\n" + json.dumps(entry).encode() + b"\n")


@contextmanager
def open_account(state: RecordDict, run: str, partition: int) -> Iterator[AccountBook]:
    """Open the account book of one run on one node, for one process at a time."""
    if not is_on_a_device():
        yield AccountBook(state, run, None)
        return
    digest = hashlib.sha256(json.dumps([run, partition, ACCOUNT]).encode()).hexdigest()[:32]
    with locked_file(f"account-{digest}") as file:
        yield AccountBook(state, run, file)


def _read_last(lines: list[bytes]) -> list[Entry]:
    """Return the last valid entry among these lines, in a list; an empty list if none is valid."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            return [entry]
    return []


def check_account_is_kept(node: Node) -> None:
    """Raise ValueError if a device with max-epsilon cannot keep its account across restarts."""
    if node.max_epsilon is not None and is_on_a_device() and persistent_folder() is None:
        raise ValueError(
            f"max-epsilon = {node.max_epsilon:g}: this device cannot keep what it spends, expected "
            "a folder ravan-flwr of its user alone in $FLWR_HOME, and no link; make that writable"
        )


class OutOfBudgetError(ValueError):
    """The error of a client whose epsilon another round would exceed."""


@dataclass(frozen=True)
class ExampleAccount:
    """A client's releases from its examples in a run."""

    rounds: int = 0
    releases: tuple[Releases, ...] = ()

    @classmethod
    def of(cls, book: AccountBook) -> "ExampleAccount":
        """Return the undamaged account with most rounds; an empty account if there is none."""
        accounts = [cls()]
        for entry in book.entries:
            try:
                parts = [entry[name] for name in ("multipliers", "rates", "numbers")]
                releases = tuple(Releases(*row) for row in zip(*parts, strict=True))
                rounds = entry["rounds"]
                sound = all(z >= LEAST_MULTIPLIER and 0 < q <= 1 <= n for z, q, n in releases)
                if not sound or {type(n) for n in (rounds, *parts[2])} != {int} or rounds < 1:
                    raise ValueError(f"it has {rounds!r} rounds and releases {releases}")
                accounts.append(cls(rounds, releases))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("this client's account is damaged: %s", error)
        return max(accounts, key=lambda account: account.rounds)

    def write(self, book: AccountBook) -> None:
        """Write this account to the book."""
        multipliers, rates, numbers = map(list, zip(*self.releases, strict=True))
        book.write_entry(rounds=self.rounds, multipliers=multipliers, rates=rates, numbers=numbers)

    def after(self, rounds: int, per_round: Releases) -> "ExampleAccount":
        """Return this account with further rounds, each of the releases `per_round`."""
        numbers = {(release.multiplier, release.rate): release.number for release in self.releases}
        mechanism = per_round.multiplier, per_round.rate
        if rounds:
            numbers[mechanism] = numbers.get(mechanism, 0) + per_round.number * rounds
        releases = tuple(Releases(*mechanism, number) for mechanism, number in numbers.items())
        return ExampleAccount(self.rounds + rounds, releases)


def count_round(
    state: RecordDict,
    run_hash: str,
    config: Config,
    rate: float,
    message: Mapping[str, Any],
    partition: int,
) -> tuple[StepNoise, bool]:
    """Count a round in the node's book; return its noise, and whether rounds were missing.

    The noise is the setting's, or calibrated to epsilon by the server. OutOfBudgetError if the
    round would exceed epsilon: then the account is unchanged.
    """
    multiplier = config.noise_multiplier or message.get("noise-multiplier")
    if not isinstance(multiplier, float) or not LEAST_MULTIPLIER <= multiplier < math.inf:
        raise ValueError(
            f"noise-multiplier = {multiplier!r} in the message: expected {LEAST_MULTIPLIER:g} or "
            "more; start server and clients with one version"
        )
    earlier_rounds = message.get("earlier-rounds")
    if type(earlier_rounds) is not int or not 0 <= earlier_rounds <= MAX_ROUNDS:
        raise ValueError(
            f"earlier-rounds = {earlier_rounds!r} in the message: expected a number of rounds, "
            f"{MAX_ROUNDS} at most; start server and clients with one version"
        )
    per_round = Releases(multiplier, rate, config.local_steps or 0)
    with open_account(state, run_hash, partition) as book:
        account = ExampleAccount.of(book)
        missing = max(0, earlier_rounds - account.rounds)
        if missing:
            # In one process the round's record has it for all clients (`recounted`).
            log.log(
                INFO if is_on_a_device() else DEBUG,
                "this client's account has %d rounds, and the server has counted %d: the account "
                "now has these, as after a restart or in a resumed run",
                *(account.rounds, earlier_rounds),
            )
        account = account.after(missing, per_round)
        after, limit = account.after(1, per_round), config.epsilon
        if (
            limit is not None
            and (epsilon_after := find_total_epsilon(after.releases, config.delta)) > limit
        ):
            epsilon_before = find_total_epsilon(account.releases, config.delta)
            raise OutOfBudgetError(
                f"epsilon = {limit:g}: after {account.rounds} rounds its examples have spent "
                f"{epsilon_before:.4g}, and one more would take that to {epsilon_after:.4g}"
            )
        after.write(book)
    assert config.clip_norm is not None  # with privacy=example it is fixed
    return StepNoise(multiplier, config.clip_norm), bool(missing)
