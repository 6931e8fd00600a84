"""Note what becomes of every message of a round, and make the round's record of it."""

import time
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from logging import getLogger
from pathlib import Path
from typing import Any, cast

from ravan_flwr.messages.plain_text import listed, plain
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.runs.record import (
    ClientRecord,
    ClientStatistics,
    Masked,
    Metrics,
    Rejection,
    RoundRecord,
    Spent,
)
from ravan_flwr.server.replies import Update

log = getLogger(__name__)

NAMED = 8  # clients with one reason, in an error
LISTED = 1000  # clients that are not in a round, at most; the others are counted
REJECTIONS_TOLD = 20  # of a round, by a line of the log each; the record has all

# By which bytes on a device's link are estimated, both ways: headers and acknowledgements of what
# travels (`python -m benchmarks.links --measure`); TLS, HTTP and signatures of the calls by which a
# message and its reply travel; and per second what a SuperNode asks while it waits.
# `make networks` compares the estimate with what the interfaces counted.
FRAMES = 1.05
MESSAGE_BYTES = 20_000
IDLE_BYTES = 520


@cache
def bundle_bytes() -> int:
    """Estimate the bytes of the app bundle as the reverse proxy sends it; 0 outside of one."""
    root = Path(__file__).resolve().parents[2]
    if root.parent.name != "apps":  # where Flower unpacks it
        return 0
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sum(len(zlib.compress(path.read_bytes())) for path in files)


@dataclass
class RoundLog:
    """Keep the notes of one round, from its first message to its record."""

    number: int
    partitions: int  # in how many the data is shared
    clients: list[ClientRecord] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    not_eligible: list[int] = field(default_factory=list)  # partitions that cannot afford to train
    skipped: list[int] = field(default_factory=list)  # were unresponsive, and were not asked
    unused: list[int] = field(default_factory=list)  # replies that were not needed
    began_anew: list[int] = field(default_factory=list)  # had lost their part of the model
    out_of_budget: list[int] = field(default_factory=list)  # have nothing left of their epsilon
    recounted: list[int] = field(default_factory=list)  # had lost a part of their account
    per_client: dict[str, ClientStatistics] = field(
        default_factory=dict
    )  # of an evaluation, over the clients
    private: Spent | None = None  # what a private run has spent, this round included
    secure: Masked | None = None  # how a round went in which uploads were masked
    refused: str = ""  # why the round has no effect, if it has none
    bytes_up: int = 0  # of all replies, also those that were rejected, and of evaluations
    bytes_down: int = 0  # of all messages
    messages: int = 0  # that were sent
    link_bytes: int | None = None  # an estimate of what was on the devices' links, if they have any
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the seconds of what happens inside to that phase."""
        began = time.perf_counter()
        yield
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

    def count(self, bytes_up: int, bytes_down: int) -> None:
        """Add the bytes that travelled between the server and one client, used or not."""
        self.bytes_up += bytes_up
        self.bytes_down += bytes_down
        self.messages += bytes_down > 0

    def estimate_link(self, nodes: int, newcomers: int) -> None:
        """Estimate the bytes on the links of so many devices, of which some fetched the bundle."""
        travels = self.bytes_up + self.bytes_down + newcomers * bundle_bytes()
        calls = MESSAGE_BYTES * (self.messages + newcomers)
        idle = IDLE_BYTES * nodes * (time.perf_counter() - self.started)
        self.link_bytes = round(FRAMES * travels + calls + idle)

    def use(
        self, update: Update, heads: list[list[int]], bytes_down: int,
        span: tuple[float, float] = (0.0, 0.0), device: str | None = None,
    ) -> None:  # fmt: skip
        """Note that an update was used, the heads in it, by layer, and what its client was sent.

        The client has worked on it during this span of the run's time.
        """
        client, mean = update.client, sum(map(len, heads)) / max(1, len(heads))
        record: ClientRecord = {
            "partition-id": client.partition_id,
            "budget-fraction": client.budget_fraction,
            "heads": int(mean) if mean.is_integer() else mean,
            "selected": heads,
            "examples": client.examples,
            "steps": update.steps,
            "bytes-up": update.bytes_up,
            "bytes-down": bytes_down,
        }
        if update.seconds is not None or device is not None:  # else how long it took is private
            record["span"] = list(span)
        optional = {
            "staleness": update.staleness or None,
            "device": device,
            "train-loss": update.loss,
            "seconds": None if update.seconds is None else round(update.seconds, 4),
            "skipped-steps": update.skipped or None,
        }
        values = {key: value for key, value in optional.items() if value is not None}
        self.clients.append(cast(ClientRecord, record | values))

    def lost(self, client: RegisteredClient) -> None:
        """Note that a client had lost its part of the model, and began with a new one."""
        self.began_anew.append(client.partition_id)
        log.warning(
            "partition %d has lost its personal parameters, as a node does that is started "
            "again, and began with new ones",
            client.partition_id,
        )

    def reject(self, client: RegisteredClient, reason: object) -> None:
        """Note that a reply was not used, or did not come, and why."""
        text = plain(str(reason))
        self.rejected.append({"client": f"partition {client.partition_id}", "reason": text})
        if len(self.rejected) <= REJECTIONS_TOLD:
            log.warning("rejected partition %d: %s", client.partition_id, text)
        if len(self.rejected) == REJECTIONS_TOLD + 1:
            log.warning("more are rejected: the record of round %d lists them all", self.number)

    @property
    def train_loss(self) -> float | None:
        """Return the clients' mean loss, whatever the order of their replies; None if not told."""
        losses = [client["train-loss"] for client in self._sorted() if "train-loss" in client]
        return mean_of(losses, [1.0] * len(losses)) if losses else None

    def record(self, metrics: Metrics, now: float = 0.0) -> RoundRecord:
        """Make the round's line of `rounds.jsonl`; it ends at that second of the run."""
        record: dict[str, Any] = {
            "round": self.number,
            "metrics": dict(metrics),
            "clients": self._sorted(),
            "rejected": self.rejected,
            "not-eligible": self.not_eligible[:LISTED],
            "skipped": self.skipped[:LISTED],
            "unused": sorted(self.unused),
            "partitions": self.partitions,
            "bytes-up": self.bytes_up,
            "bytes-down": self.bytes_down,
            "time": now,
            "seconds": round(time.perf_counter() - self.started, 4),
            "phases": {phase: round(seconds, 4) for phase, seconds in self.phases.items()},
        }
        optional = {
            "link-bytes-estimate": self.link_bytes,
            "train-loss": self.train_loss,
            "privacy": self.private,
            "secure": self.secure,
            "more-not-eligible": max(0, len(self.not_eligible) - LISTED) or None,
            "more-skipped": max(0, len(self.skipped) - LISTED) or None,
            "refused": self.refused or None,
            "per-client": self.per_client or None,
            "out-of-budget": self.out_of_budget[:LISTED] or None,
            "recounted": sorted(self.recounted) or None,
            "began-anew": sorted(self.began_anew) or None,
        }
        record |= {key: value for key, value in optional.items() if value is not None}
        return cast(RoundRecord, record)

    def why_too_few_came(self, least: int) -> str:
        """Explain that fewer replies were used than a round needs."""
        by_reason: dict[str, list[str]] = {}
        for rejection in self.rejected:
            by_reason.setdefault(rejection["reason"], []).append(rejection["client"])
        reasons = listed(f"{_named(clients)}: {reason}" for reason, clients in by_reason.items())
        n = len(self.clients) or "no"
        message = (
            f"round {self.number}: got {n} valid {'reply' if n in (1, 'no') else 'replies'}, "
            f"expected at least {'one' if least == 1 else f'min-replies = {least}'}: "
            f"{reasons or 'no other client is connected'}."
        )
        if self.number > 1:
            message += (
                f" Round {self.number - 1} is in the last checkpoint; mend the clients, then use "
                "resume=RUN"
            )
        return message

    def _sorted(self) -> list[ClientRecord]:
        return sorted(self.clients, key=lambda client: client["partition-id"])


def _named(clients: Sequence[str]) -> str:
    """Name clients that have a reason in common, the first few of them."""
    if len(clients) == 1:
        return clients[0]
    numbers = (client.removeprefix("partition ") for client in clients)
    return f"partitions {listed(numbers, NAMED, ', ')}"


def mean_of(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of numbers that were checked, so that no sum of them overflows."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
