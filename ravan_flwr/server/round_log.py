"""Log the outcome of every message of a round, and make the round's record."""

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
    MaskedRecord,
    Metrics,
    PrivacyRecord,
    Rejection,
    RoundRecord,
)
from ravan_flwr.server.update import Update

log = getLogger(__name__)

NAMED = 8  # clients that an error names per reason
LISTED = 1000  # clients in a record's list of clients that did not train; the others are counted
REJECTIONS_LOGGED = 20  # per round, with a log line each; the record has all

# Constants of the estimate of bytes on the devices' links, both ways: headers and acknowledgements
# of what is sent (a factor; `python -m benchmarks.links --measure`); TLS, HTTP and signatures of
# the calls for one message and its reply; and a waiting SuperNode's calls per second.
# `make networks` compares the estimate with the counters of the network interfaces.
FRAMES = 1.05
MESSAGE_BYTES = 20_000
IDLE_BYTES = 520


@cache
def bundle_bytes() -> int:
    """Estimate the app bundle's bytes as the reverse proxy sends it; 0 outside of a bundle."""
    root = Path(__file__).resolve().parents[2]
    if root.parent.name != "apps":  # where Flower unpacks it
        return 0
    files = (path for path in root.rglob("*") if path.is_file() and path.suffix != ".pyc")
    return sum(len(zlib.compress(path.read_bytes())) for path in files)


@dataclass
class RoundLog:
    """The log of one round, from its first message to its record."""

    number: int
    partitions: int  # number of partitions of the data
    clients: list[ClientRecord] = field(default_factory=list)
    rejected: list[Rejection] = field(default_factory=list)
    late: list[Rejection] = field(default_factory=list)  # came now; rejected when they were missing
    phases: dict[str, float] = field(default_factory=dict)  # seconds
    not_eligible: list[int] = field(default_factory=list)  # partitions that cannot afford to train
    skipped: list[int] = field(default_factory=list)  # unresponsive, and not asked
    unused: list[int] = field(default_factory=list)  # their replies were not needed
    began_anew: list[int] = field(default_factory=list)  # had lost their personal parameters
    out_of_budget: list[int] = field(default_factory=list)  # have no privacy budget left
    recounted: list[int] = field(default_factory=list)  # had lost a part of their account
    per_client: dict[str, ClientStatistics] = field(
        default_factory=dict
    )  # of an evaluation, over the clients
    private: PrivacyRecord | None = None  # what a private run has spent, this round included
    secure: MaskedRecord | None = None  # the course of a round with masked uploads
    refused: str = ""  # why the round has no effect; "" if it has one
    bytes_up: int = 0  # of all replies, also rejected ones, and of evaluations
    bytes_down: int = 0  # of all messages
    messages: int = 0  # sent messages
    link_bytes: int | None = None  # estimated bytes on the devices' links; None in a simulation
    started: float = field(default_factory=time.perf_counter)

    @contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        """Add the duration of the code inside to that phase."""
        began = time.perf_counter()
        yield
        self.phases[phase] = self.phases.get(phase, 0.0) + time.perf_counter() - began

    def count_bytes(self, bytes_up: int, bytes_down: int) -> None:
        """Add the bytes of one client's message and reply, used or not."""
        self.bytes_up += bytes_up
        self.bytes_down += bytes_down
        self.messages += bytes_down > 0

    def estimate_link(self, nodes: int, newcomers: int) -> None:
        """Estimate the bytes on the links of `nodes` devices; `newcomers` fetched the bundle."""
        travels = self.bytes_up + self.bytes_down + newcomers * bundle_bytes()
        calls = MESSAGE_BYTES * (self.messages + newcomers)
        idle = IDLE_BYTES * nodes * (time.perf_counter() - self.started)
        self.link_bytes = round(FRAMES * travels + calls + idle)

    def use(
        self, update: Update, heads: list[list[int]], bytes_down: int,
        span: tuple[float, float] = (0.0, 0.0), device: str | None = None,
    ) -> None:  # fmt: skip
        """Log a used update: its heads by layer, the bytes its client was sent, and its time span.

        `span` has the start and the end of the client's work, in seconds of the run.
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
        if update.seconds is not None or device is not None:  # else durations are private
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

    def reject(self, client: RegisteredClient, reason: object) -> None:
        """Log a reply that was rejected or is missing, with the reason."""
        text = plain(str(reason))
        self.rejected.append({"client": f"partition {client.partition_id}", "reason": text})
        if len(self.rejected) <= REJECTIONS_LOGGED:
            log.warning("rejected partition %d: %s", client.partition_id, text)
        if len(self.rejected) == REJECTIONS_LOGGED + 1:
            log.warning("more are rejected: the record of round %d lists them all", self.number)

    def note_late(self, client: RegisteredClient, reason: str) -> None:
        """Log a reply that an earlier round has rejected as missing."""
        self.late.append({"client": f"partition {client.partition_id}", "reason": reason})
        log.info("partition %d is %s", client.partition_id, reason)

    @property
    def train_loss(self) -> float | None:
        """Return the clients' mean loss, independent of the replies' order; None without losses."""
        losses = [client["train-loss"] for client in self._sorted() if "train-loss" in client]
        return weighted_mean(losses, [1.0] * len(losses)) if losses else None

    def record(self, metrics: Metrics, now: float = 0.0) -> RoundRecord:
        """Return the round's line of `rounds.jsonl`; `now` is the second of the run."""
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
            "late": self.late or None,
            "began-anew": sorted(self.began_anew) or None,
        }
        record |= {key: value for key, value in optional.items() if value is not None}
        return cast(RoundRecord, record)

    def too_few_replies_message(self, min_replies: int) -> str:
        """Return the error message of a round with fewer valid replies than it needs."""
        by_reason: dict[str, list[str]] = {}
        for rejection in self.rejected:
            by_reason.setdefault(rejection["reason"], []).append(rejection["client"])
        reasons = listed(f"{_named(clients)}: {reason}" for reason, clients in by_reason.items())
        n = len(self.clients) or "no"
        message = (
            f"round {self.number}: got {n} valid {'reply' if n in (1, 'no') else 'replies'}, "
            f"expected at least {'one' if min_replies == 1 else f'min-replies = {min_replies}'}: "
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
    """Return the names of the first clients of a list, for an error message."""
    if len(clients) == 1:
        return clients[0]
    numbers = (client.removeprefix("partition ") for client in clients)
    return f"partitions {listed(numbers, NAMED, ', ')}"


def weighted_mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Return the weighted mean of numbers, which were checked so that their sum cannot overflow."""
    return sum(weight * value for weight, value in zip(weights, values, strict=True)) / sum(weights)
