"""Account on a device for what it has released in a run, and refuse what would exceed a limit.

An account is written before anything leaves: what was counted may never have left, never the other
way round. Flower starts a process for every message, gives each the node's state as it was when it
began, and keeps that of the one that ends last. So a question that begins before a round, and ends
after it, would take the round out of the node's state again, as often as a server asks it. On a
device every entry is a line of a file as well, which only this user can write. The file stays when
a SuperNode is started again; its node's state does not. A run that goes on is a new one to Flower.
So the server says with each round what it has counted before; where that is more, it is believed.

No torch here: a process that a SuperNode starts for a light message loads nothing heavy.
"""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import DEBUG, INFO, getLogger
from typing import TYPE_CHECKING, Any, BinaryIO

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.on_device import append, is_on_a_device, kept_folder, locked_file
from ravan_flwr.config.node_config import Node
from ravan_flwr.privacy.account import LEAST, Releases, StepNoise, epsilon_of_all

if TYPE_CHECKING:
    from ravan_flwr.config.run_config import Config

log = getLogger(__name__)

EXAMPLES = "privacy-account"  # the record in a node's state
MOST_ROUNDS = 1_000_000  # that a run has

Entry = Mapping[str, Any]


class AccountBook:
    """Hold the entries that there are of a run's account, as nobody else can change them now."""

    def __init__(self, state: RecordDict, run: str, file: BinaryIO | None) -> None:
        self._state, self._run, self._file = state, run, file

    @property
    def entries(self) -> list[Entry]:
        """Return the last entry of each place: either may have missed some that the other has."""
        record = self._state.get(EXAMPLES)
        entries: list[Entry] = [record] if isinstance(record, ConfigRecord) else []
        if self._file is not None:
            self._file.seek(0)
            entries += _last_of(self._file.read().splitlines())
        return [entry for entry in entries if entry.get("run") == self._run]

    def enter(self, **entry: Any) -> None:
        """Put an entry into both places; it is on disk when this returns."""
        entry["run"] = self._run
        self._state[EXAMPLES] = ConfigRecord(entry)
        if self._file is not None:
            # A line of its own, also after one that was not written whole.
            append(self._file, b"\n" + json.dumps(entry).encode() + b"\n")


@contextmanager
def opened_book(state: RecordDict, run: str, partition: int) -> Iterator[AccountBook]:
    """Lend the book of an account, of one run on one node, to one process at a time."""
    if not is_on_a_device():
        yield AccountBook(state, run, None)
        return
    place = hashlib.sha256(json.dumps([run, partition, EXAMPLES]).encode()).hexdigest()[:32]
    with locked_file(f"account-{place}") as file:
        yield AccountBook(state, run, file)


def _last_of(lines: list[bytes]) -> list[Entry]:
    """Read the last line that is one; none if there is none."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            return [entry]
    return []


def check_kept(node: Node) -> None:
    """Raise ValueError if a device that requires an epsilon could not keep its account."""
    if node.max_epsilon is not None and is_on_a_device() and kept_folder() is None:
        raise ValueError(
            f"max-epsilon = {node.max_epsilon:g}: this device cannot keep what it spends, expected "
            "a folder ravan-flwr of its user alone in $FLWR_HOME, and no link; make that writable"
        )


class SpentError(ValueError):
    """Say that a client trains no further, since its epsilon would be exceeded."""


@dataclass(frozen=True)
class ExampleAccount:
    """Hold what a client has released of its examples in a run."""

    rounds: int = 0
    releases: tuple[Releases, ...] = ()

    @classmethod
    def of(cls, book: AccountBook) -> "ExampleAccount":
        """Read the one that has most rounds, of those that are not damaged; or an empty one."""
        accounts = [cls()]
        for entry in book.entries:
            try:
                parts = [entry[name] for name in ("multipliers", "rates", "numbers")]
                releases = tuple(Releases(*row) for row in zip(*parts, strict=True))
                rounds = entry["rounds"]
                sound = all(z >= LEAST and 0 < q <= 1 <= n for z, q, n in releases)
                if not sound or {type(n) for n in (rounds, *parts[2])} != {int} or rounds < 1:
                    raise ValueError(f"it has {rounds!r} rounds and releases {releases}")
                accounts.append(cls(rounds, releases))
            except (KeyError, TypeError, ValueError) as error:
                log.warning("this client's account is of no use: %s", error)
        return max(accounts, key=lambda account: account.rounds)

    def write(self, book: AccountBook) -> None:
        """Enter it."""
        multipliers, rates, numbers = map(list, zip(*self.releases, strict=True))
        book.enter(rounds=self.rounds, multipliers=multipliers, rates=rates, numbers=numbers)

    def after(self, rounds: int, per_round: Releases) -> "ExampleAccount":
        """Return the account with so many further rounds of that many releases each."""
        numbers = {(release.multiplier, release.rate): release.number for release in self.releases}
        kind = per_round.multiplier, per_round.rate
        if rounds:
            numbers[kind] = numbers.get(kind, 0) + per_round.number * rounds
        releases = tuple(Releases(*kind, number) for kind, number in numbers.items())
        return ExampleAccount(self.rounds + rounds, releases)


def take_part(
    state: RecordDict,
    mark: str,
    config: "Config",
    rate: float,
    message: Mapping[str, Any],
    partition: int,
) -> tuple[StepNoise, bool]:
    """Count a round in the node's book; return its noise, and whether rounds were missing.

    The noise is as set, or as the server has calibrated it to epsilon. SpentError, and the account
    as it was, if the round would exceed epsilon.
    """
    multiplier = config.noise_multiplier or message.get("noise-multiplier")
    if not isinstance(multiplier, float) or not LEAST <= multiplier < math.inf:
        raise ValueError(
            f"noise-multiplier = {multiplier!r} in the message: expected {LEAST:g} or more; start "
            "server and clients with one version"
        )
    past = message.get("earlier-rounds")
    if type(past) is not int or not 0 <= past <= MOST_ROUNDS:
        raise ValueError(
            f"earlier-rounds = {past!r} in the message: expected a number of rounds, {MOST_ROUNDS} "
            "at most; start server and clients with one version"
        )
    per_round = Releases(multiplier, rate, config.local_steps or 0)
    with opened_book(state, mark, partition) as book:
        account = ExampleAccount.of(book)
        missing = max(0, past - account.rounds)
        if missing:
            # In one process the record says it of all of them (`recounted`).
            log.log(
                INFO if is_on_a_device() else DEBUG,
                "this client's account has %d rounds, and the server has asked it in %d: it counts "
                "all of these, as after a restart or in a resumed run",
                *(account.rounds, past),
            )
        account = account.after(missing, per_round)
        after, most = account.after(1, per_round), config.epsilon
        if most is not None and (then := epsilon_of_all(after.releases, config.delta)) > most:
            now = epsilon_of_all(account.releases, config.delta)
            raise SpentError(
                f"epsilon = {most:g}: after {account.rounds} rounds its examples have spent "
                f"{now:.4g}, and one more would take that to {then:.4g}"
            )
        after.write(book)
    assert config.clip_norm is not None  # of privacy=example it never adapts
    return StepNoise(multiplier, config.clip_norm), bool(missing)
