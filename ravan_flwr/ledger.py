"""The book of one round: whose reply was used, whose was not and why, and the record of it."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from logging import getLogger
from typing import Any

from ravan_flwr.recruiting import listed
from ravan_flwr.roster import Member

log = getLogger(__name__)


@dataclass
class Ledger:
    """One round, from its first message to its record."""

    number: int
    clients: list[dict[str, Any]] = field(default_factory=list)
    rejected: list[dict[str, str]] = field(default_factory=list)
    evaluated: dict[str, int] = field(default_factory=dict)  # clients, bytes of their evaluation
    left_out: list[int] = field(default_factory=list)  # partitions that cannot afford to train
    started: float = field(default_factory=time.perf_counter)

    def leave_out(self, members: Sequence[Member]) -> None:
        """These cannot afford to train, and were not asked."""
        self.left_out = [member.partition_id for member in members]
        if self.left_out and self.number <= 1:
            log.info(
                "%d clients cannot afford the whole method and are left out: partitions %s",
                len(self.left_out), ", ".join(map(str, self.left_out)),
            )  # fmt: skip

    def use(
        self,
        member: Member,
        metrics: Mapping[str, float],
        selected: list[list[int]],
        bytes_up: int,
        bytes_down: int,
    ) -> None:
        """A reply was used; `selected` are the heads that it holds, by layer."""
        heads = sum(map(len, selected)) / max(1, len(selected))
        self.clients.append(
            {
                "partition-id": member.partition_id,
                "share": member.share,
                "heads": int(heads) if heads.is_integer() else heads,
                "selected": selected,
                "examples": member.examples,
                "train-loss": metrics["train-loss"],
                "seconds": round(metrics["seconds"], 4),
                "bytes-up": bytes_up,
                "bytes-down": bytes_down,
            }
        )

    def evaluate(self, bytes_down: int) -> None:
        """A client evaluated; its answer is numbers, not arrays."""
        for key, more in (("clients", 1), ("bytes-down", bytes_down)):
            self.evaluated[key] = self.evaluated.get(key, 0) + more

    def reject(self, member: Member, reason: object) -> None:
        """A reply was not used, or did not come."""
        text = f"missing {reason}" if isinstance(reason, KeyError) else str(reason)
        self.rejected.append({"client": f"partition {member.partition_id}", "reason": text})
        log.warning("rejected partition %d: %s", member.partition_id, text)

    @property
    def train_loss(self) -> float:
        """The clients' mean, summed in an order in which that of arrival plays no part."""
        losses = [client["train-loss"] for client in self._sorted()]
        return float(sum(losses) / len(losses))

    def record(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """The round's line of `rounds.jsonl`."""
        return {
            "round": self.number,
            "train-loss": self.train_loss,
            "metrics": dict(metrics),
            "clients": self._sorted(),
            "rejected": self.rejected,
            "left-out": self.left_out,
            **({"evaluation": self.evaluated} if self.evaluated else {}),
            "seconds": round(time.perf_counter() - self.started, 4),
        }

    def why_nothing_came(self) -> str:
        """For people, when no reply was used."""
        reasons = listed(f"{one['client']}: {one['reason']}" for one in self.rejected)
        message = (
            f"round {self.number}: got no valid reply, expected at least one: "
            f"{reasons or 'no client is connected'}."
        )
        if self.number > 1:
            message += (
                f" Round {self.number - 1} is in the last checkpoint; mend the clients and go on "
                "from there with resume=RUN"
            )
        return message

    def _sorted(self) -> list[dict[str, Any]]:
        return sorted(self.clients, key=lambda client: int(client["partition-id"]))
