"""Keep a private run's account on disk, and ahead of what it accounts for (`privacy=client`).

`privacy.json` says how many releases there may have been, and what they spend. It is written before
the noise of a round is drawn: a run that is stopped in between has counted a release that never
was, never the other way round. A run that goes on goes on counting, also one that goes back to an
earlier round, since what was released stays released.

The sampling rate is fixed when the run begins, by the clients that there are then.

With secure aggregation there is a second account: what the server may learn of each client, which
knows who takes part and sees sums before it has added the rest of the noise. There no draw hides
anybody, so that what counts is how often a client took part, and with how much noise. That follows
from the cohorts, which the operator alone may know: what is published is a bound that does not.
"""

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from logging import getLogger
from typing import Any

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import Config
from ravan_flwr.privacy.account import epsilon_of, epsilon_seen, multiplier_for
from ravan_flwr.privacy.cohorts import most_rounds, why_not_masked
from ravan_flwr.privacy.mechanism import Noise
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.resume import ResumePoint

log = getLogger(__name__)

NAME = "privacy.json"
CLOSE = 1e-6  # two accounts of the same releases
_NUMBERS = ("noise-multiplier", "sampling-rate", "delta")
MOST_RELEASES = KEYS["num-rounds"].high
MOST_SEEN = 1e12  # sum of a client in `to-server`


class PrivacyBudget:
    """Say what a run has spent, and whether a further release is within its epsilon.

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
        self.releases = int(before["releases"]) if before else 0
        self.rate = float(before["sampling-rate"]) if before else 0.0  # 0: not known yet
        self.multiplier = float(before["noise-multiplier"]) if before else 0.0
        seen = before.get("to-server", {}) if before else {}
        self.seen = {int(partition): float(sum_) for partition, sum_ in seen.items()}
        self._clients = 0  # the most from which a round has drawn

    @classmethod
    def of(
        cls, config: Config, directory: RunDirectory, start: ResumePoint
    ) -> "PrivacyBudget | None":
        """Open a run's account; None if it is not one with privacy of clients."""
        if config.privacy != "client":
            return None
        before = read_account(directory, start, partial(_problems, config=config))
        return cls(config, partial(directory.write_json, NAME), before)

    def begin(self, registry: ClientRegistry, rounds: int) -> None:
        """Fix the sampling rate and the noise of a new run; tell what the run will spend."""
        clients = self._clients = max(registry.partitions, len(registry.members))
        if not self.rate:
            self.rate = min(1.0, self.config.clients_per_round / clients)
            self.multiplier = self.config.noise_multiplier or multiplier_for(
                self._limit or 0.0, self.rate, self.delta, rounds
            )
        if self.is_spent and not self.releases:
            raise ValueError(
                f"epsilon = {self._limit:g}: one round takes {self._epsilon(1):.4g} with "
                f"noise-multiplier = {self.multiplier:g}, expected room for one at least; raise "
                "the one or the other"
            )
        if self.config.secure_aggregation and (why := self.why_not_masked(len(registry.members))):
            raise ValueError(why)
        self._introduce(clients, rounds)

    def why_not_masked(self, members: int) -> str:
        """Say why a cohort of so many members must not be masked; "" if it may be."""
        config = self.config
        least, rounds = config.secure_minimum, config.num_rounds
        return why_not_masked(members, self.rate, least, rounds, self.delta)

    @property
    def epsilon(self) -> float:
        """Return what the releases so far have spent."""
        return self._epsilon(self.releases)

    @property
    def is_spent(self) -> bool:
        """Tell whether no further release is within the limit."""
        return self._limit is not None and self._epsilon(self.releases + 1) > self._limit

    @property
    def is_last(self) -> bool:
        """Tell whether the round that begins is the last within the limit."""
        return self._limit is not None and self._epsilon(self.releases + 2) > self._limit

    def add(self, record: RoundRecord) -> None:
        """Count nothing: `spend` has, before the round's release."""

    def tell(self, number: int) -> None:
        """Log why that round is not held."""
        log.info("epsilon: no room for round %d; the run ends here", number)

    def noise(self, members: int) -> Noise:
        """Say how much noise a round needs that draws from so many members."""
        config, self._clients = self.config, max(self._clients, members)
        adaptive = config.clip_norm is None
        return Noise(self.multiplier, self.rate * members, adaptive, config.noise_cohort)

    def spend(self, asked: Collection[int] = (), shown: float = 0.0) -> None:
        """Count one release more, on disk when this returns.

        In a secure round the server sees sums over these partitions, whose noise has `shown`.
        """
        self.releases += 1
        for partition in asked:
            self.seen[partition] = self.seen.get(partition, 0.0) + shown
        more: dict[str, Any] = {"releases": self.releases, "sampling-rate": self.rate}
        if self.config.secure_aggregation:
            more["to-server"] = {str(one): sum_ for one, sum_ in sorted(self.seen.items())}
        self._write(self.told() | more)

    def told(self) -> dict[str, Any]:
        """Say what was spent, as the records and the summary have it."""
        told: dict[str, Any] = {
            "epsilon": self.epsilon,
            "delta": self.delta,
            "noise-multiplier": self.multiplier,
        }
        if self.config.noise_cohort is not None:
            told["noise-cohort"] = self.config.noise_cohort
        if self.config.secure_aggregation:
            told["epsilon-to-server"] = epsilon_seen(max(self.seen.values(), default=0), self.delta)
            told["epsilon-to-server-bound"] = self._bound_to_server()
        return told

    def _bound_to_server(self) -> float:
        """Return what the server has seen of a client at most, by the chances of the draws alone.

        Cohorts exceed it with a chance of delta. Of a round's noise two thirds are there at least.
        """
        rounds = most_rounds(self._clients, self.rate, self.releases, 1 - self.delta)
        return epsilon_seen(rounds * 1.5 / self.multiplier**2, self.delta)

    def _epsilon(self, releases: int) -> float:
        return epsilon_of(self.multiplier, self.rate, self.delta, releases)

    def _introduce(self, clients: int, rounds: int) -> None:
        """Log what protects the clients, and what would be spent to the end."""
        to_come = max(0, rounds - self.releases)
        log.info(
            "privacy=client: noise multiplier %.4g, each of %d clients in a round with probability "
            "%.4g; epsilon %.3f so far, %.3f after %d more rounds, delta %g",
            *(self.multiplier, clients, self.rate, self.epsilon),
            *(self._epsilon(self.releases + to_come), to_come, self.delta),
        )
        if self.delta * clients >= 1:
            log.warning(
                "delta=%g with %d clients: one of them may be given away whole; set it below %.1g",
                *(self.delta, clients, 1 / clients),
            )
        if self.config.noise_cohort is not None:
            log.warning(
                "noise-cohort=%d: a study; epsilon is what a federation with as many clients a "
                "round would have, and the clients of this run are not protected by it",
                self.config.noise_cohort,
            )


Records = Sequence[RoundRecord]


def read_account(
    directory: RunDirectory,
    start: ResumePoint,
    problems: Callable[[Mapping[str, Any], Records], Iterator[str]],
) -> Mapping[str, Any] | None:
    """Read the account of a run that goes on, None of a new one; ValueError for a wrong one.

    `problems` lists what is wrong with it by itself, and by all records, those too that the run
    goes back behind.
    """
    if start.done is None:
        return None
    wrong, before = "it is missing", {}
    if (directory.path / NAME).is_file():
        before, records = directory.read_json(NAME), directory.read_rounds()
        found = chain(problems(before, records), _contradictions(before, records))
        wrong = next(found, "")
    if wrong:
        raise ValueError(
            f"{directory.path / NAME}: {wrong}, expected the account of the run that goes "
            "on; restore the file, since without it nobody knows what was spent"
        )
    return before


def _contradictions(before: Mapping[str, Any], records: Records) -> Iterator[str]:
    """List where an account of sound values has other noise than a record, or spends less."""
    for record in records:
        told: Mapping[str, Any] = record.get("privacy", {})
        for key in ("noise-multiplier", "epsilon", *({"epsilon-to-server"} & before.keys())):
            here, there = before[key], told.get(key)
            same = agree(there, here) or (key != "noise-multiplier" and is_less(there, here))
            if not same:
                yield f"{key} = {here!r}, and round {record['round']} has {there!r}"


def agree(found: object, expected: float) -> bool:
    """Tell whether a number of a file is one that was worked out, on whatever machine."""
    return isinstance(found, int | float) and math.isclose(found, expected, rel_tol=CLOSE)


def is_less(found: object, expected: float) -> bool:
    """Tell whether a number of a file is less than that."""
    return isinstance(found, int | float) and found < expected


def times_used(records: Records) -> Counter[int]:
    """Count the rounds in which a reply of each partition was used."""
    return Counter(client["partition-id"] for record in records for client in record["clients"])


def _problems(before: Mapping[str, Any], records: Records, config: Config) -> Iterator[str]:
    """List the values of the file that are not as a run writes them, those first that others need.

    Epsilon follows from the others, which the settings and the records have as well.
    """
    for key in _NUMBERS:
        value = before.get(key)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            yield f"{key} = {value!r}"
    z, rate, delta = (float(before[key]) for key in _NUMBERS)
    if rate > 1 or delta != config.delta:
        yield f"sampling-rate = {rate}, delta = {delta}"
    releases = before.get("releases")
    if type(releases) is not int or not max(1, len(records)) <= releases <= MOST_RELEASES:
        yield f"releases = {releases!r} after {len(records)} rounds"
    if config.noise_multiplier not in (None, z):
        yield f"noise-multiplier = {z!r}, and the run has {config.noise_multiplier!r}"
    spent = epsilon_of(z, rate, delta, releases or 0)
    if not agree(before.get("epsilon"), spent):
        yield f"epsilon = {before.get('epsilon')!r}, and its releases spend {spent!r}"
    first = epsilon_of(z, rate, delta, 1)
    told = records[0].get("privacy", {}).get("epsilon") if records else first
    if not agree(told, first):
        yield (
            f"noise-multiplier = {z}, sampling-rate = {rate}, by which round 1 spends {first!r}, "
            f"and it has {told!r}"
        )
    if config.secure_aggregation:
        yield from _problems_to_server(before, records, delta)


def _problems_to_server(before: Mapping[str, Any], records: Records, delta: float) -> Iterator[str]:
    """List what is wrong with the account of what the server has seen."""
    seen = before.get("to-server")
    if not isinstance(seen, dict) or not all(
        name.isdecimal() and type(sum_) is float and 0 < sum_ <= MOST_SEEN
        for name, sum_ in seen.items()
    ):
        yield f"to-server = {str(seen)[:80]}"
        return
    for partition, rounds in times_used(records).items():
        sum_, least = seen.get(str(partition), 0.0), rounds / before["noise-multiplier"] ** 2
        if sum_ < least * (1 - CLOSE):
            yield f"to-server = {sum_!r} of partition {partition}, which took part {rounds} times"
    told, spent = (
        before.get("epsilon-to-server"),
        epsilon_seen(max(seen.values(), default=0), delta),
    )
    if not agree(told, spent):
        yield f"epsilon-to-server = {told!r}, and to-server makes that {spent!r}"
