"""Give every connected node the run's result to keep, and write down who has it.

The run is over then, and its own result is on disk: whatever a node does costs its own entry in
`summary.json`, and whatever fails here is told there and does not make the run fail.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from logging import getLogger

from flwr.app import ConfigRecord, Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.parcel import Parcel, check_run_name, new_run_id, read_answer
from ravan_flwr.messages.plain_text import listed, plain
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.tensors import Tensors, checksum
from ravan_flwr.reports.card import measured
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Delivered, Metrics, Rejection, RoundRecord, Summary
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.replies import content_of, telling
from ravan_flwr.server.reply_collector import MessageBuilder, ReplyCollector
from ravan_flwr.server.reply_fetcher import RoundDeadline, in_process
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.status import Status

log = getLogger(__name__)

KIND = f"{MessageType.QUERY}.deliver"
NO_PLACE = "its node config has no result-path"
AWAY = "it was not connected when the result was delivered"
LATER = "It can be delivered later: ravan-flwr deliver RUN SUPERLINK"


class DeliverAtEnd(Callback):
    """Deliver the result of a run when it has ended; `state` is that without a further round."""

    def __init__(
        self,
        grid: Grid,
        config: Config,
        registry: ClientRegistry,
        mail: MessageBuilder,
        status: Status,
        directory: RunDirectory,
        state: Tensors,
    ) -> None:
        self.grid, self.directory, self.state = grid, directory, state
        self.delivery = Delivery(config, registry, mail, status)

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.state = dict(state)

    def on_run_end(self) -> None:
        summary = self.directory.read_summary()
        shown = measured(summary, self.directory)
        hand_out(self.grid, self.delivery, self.directory, self.state, summary, shown)


def hand_out(
    grid: Grid,
    delivery: "Delivery",
    directory: RunDirectory,
    state: Tensors,
    summary: Summary,
    shown: Metrics | None = None,
) -> None:
    """Deliver the state, and add to `summary.json` who has it and who could not have it.

    `shown` are the metrics for the devices' model cards, where they are not those of the summary.
    """
    earlier = Outcome(summary.get("delivered", []), summary.get("not-delivered", []))
    try:
        parcel = make_parcel(directory, state, summary, shown)
        now = delivery.to_all(grid, state, parcel)
    except Exception as error:  # noqa: BLE001 (the result is safe, and the run has not failed)
        log.warning("the result was not delivered: %s. %s", error, LATER)
        now = Outcome(missed=[{"client": "all", "reason": plain(str(error))}])
    both = now.after(earlier)
    summary["delivered"], summary["not-delivered"] = both.delivered, both.missed
    now.tell()
    try:
        directory.write_json("summary.json", summary)
    except OSError as error:
        log.warning("who has the result is not in summary.json: %s", error)


# What a device is told of a private run, which its model card says. Of the rest some tells who took
# part, or how many, and no account covers that.
PUBLISHED = (
    "method", "preset", "seed", "num-clients", "rounds", "rank", "trainable-parameters", "metrics",
    "unit", "epsilon", "delta", "noise-multiplier", "noise-cohort", "epsilon-to-server-bound",
)  # fmt: skip


def make_parcel(
    directory: RunDirectory, state: Tensors, summary: Summary, shown: Metrics | None = None
) -> Parcel:
    """Describe a run's result; ValueError if its name cannot be that of a device's folder."""
    kept_back = {"delivered", "not-delivered", "run-id"}
    listed = PUBLISHED if "epsilon" in summary else summary.keys() - kept_back
    told = {k: v for k, v in summary.items() if k in listed}
    if shown is not None:
        told["metrics"] = {**summary["metrics"], "final": shown}
    return Parcel(
        run=check_run_name(directory.path.name),
        run_id=summary.setdefault("run-id", new_run_id()),
        last_round=summary["rounds"],
        checksum=checksum(state),
        summary=json.dumps(told),
    )


@dataclass
class Outcome:
    """Say who has the result, and why others have not."""

    delivered: list[Delivered] = field(default_factory=list)
    missed: list[Rejection] = field(default_factory=list)

    def after(self, earlier: "Outcome") -> "Outcome":
        """Add what was noted at an earlier delivery of the same result, where nothing is newer.

        Who had the result then and is away now has it still.
        """
        now = {_name(one): one for one in self.delivered}
        told = {one["client"]: one for one in self.missed if one["reason"] != AWAY}
        had = {_name(one): one for one in earlier.delivered if _name(one) not in told}
        have = had | now
        missed = {one["client"]: one for one in (*earlier.missed, *self.missed)}
        missed = {name: one for name, one in missed.items() if name not in have}
        if "all" not in told:
            missed.pop("all", None)
        return Outcome(
            sorted(have.values(), key=lambda one: one["partition-id"]),
            sorted(missed.values(), key=_by_number),
        )

    def tell(self) -> None:
        """Log it: who has it and how many want none in one line, in another who could not."""
        if any(one["client"] == "all" for one in self.missed):
            return  # told already
        has = [str(one["partition-id"]) for one in self.delivered]
        could_not = [one for one in self.missed if one["reason"] != NO_PLACE]
        without = len(self.missed) - len(could_not)
        log.info(
            "result delivered to %s%s",
            f"partition{'s' * (len(has) > 1)} {listed(has, 20, ', ')}" if has else "nobody",
            f"; {without} without result-path in the node config" if without else "",
        )
        if could_not:
            reasons = listed(f"{one['client']}: {one['reason']}" for one in could_not)
            log.warning("not delivered to %d: %s. %s", len(could_not), reasons, LATER)


class _Notes(RoundLog):
    """Note who could not keep the result, and why."""

    def reject(self, member: RegisteredClient, reason: object) -> None:
        self.rejected.append(_missed(member, plain(str(reason))))


def _missed(member: RegisteredClient, reason: str) -> Rejection:
    return {"client": f"partition {member.partition_id}", "reason": reason}


def _name(delivered: Delivered) -> str:
    return f"partition {delivered['partition-id']}"


def _by_number(missed: Rejection) -> tuple[bool, int]:
    """Sort partitions by their numbers, and after them what has none."""
    kind, _, number = missed["client"].partition(" ")
    return kind != "partition", int(number or 0)


class Delivery:
    """Send a result to the registered clients, and collect their answers."""

    def __init__(
        self, config: Config, registry: ClientRegistry, mail: MessageBuilder, status: Status
    ) -> None:
        self._config, self._registry, self._mail, self._status = config, registry, mail, status

    def to_all(self, grid: Grid, state: Tensors, parcel: Parcel) -> Outcome:
        """Send it to every client that is connected and has a place for it, whatever its budget."""
        config, registry = self._config, self._registry
        registry.catch_up(grid)
        present, number = registry.present(grid), parcel.last_round
        notes = _Notes(number, registry.partitions)
        collector = ReplyCollector(self._mail, registry.nodes, notes, self._status)
        arrays, settings = to_record(state), ConfigRecord(dict(parcel.as_config()))
        messages = [
            self._mail.message(member, KIND, number, arrays, settings)
            for member in present
            if member.keeps_result
        ]

        def deadline(asked: int) -> RoundDeadline:
            """Wait as a round does: for stragglers, and no longer than its timeout."""
            grace = math.inf if in_process(grid) else config.straggler_grace
            return RoundDeadline(config.round_timeout, asked, config.min_replies, grace)

        def check(reply: Message, member: RegisteredClient) -> Delivered:
            with telling():
                records = content_of(reply).config_records
                if "kept" not in records:
                    raise ValueError("missing 'kept'")
                folder = read_answer(records["kept"], parcel)
                return {"partition-id": member.partition_id, "folder": folder}

        delivered: list[Delivered] = []
        collector.take(collector.replies(grid, messages, deadline), check, delivered.append)
        without = [_missed(member, NO_PLACE) for member in present if not member.keeps_result]
        missed = [*notes.rejected, *without, *self._absent(present)]
        delivered.sort(key=lambda one: one["partition-id"])
        return Outcome(delivered, sorted(missed, key=_by_number))

    def _absent(self, present: list[RegisteredClient]) -> list[Rejection]:
        """Name the nodes that were known and were not asked, and say why."""
        there = {member.node_id for member in present}
        missed: list[Rejection] = []
        for node in self._registry.nodes.values():
            if node.node_id in there:
                continue
            if node.member is not None:
                missed.append(_missed(node.member, AWAY))
            else:
                reason = f"refused: {node.refused}" if node.refused else "it answered no query"
                missed.append({"client": f"node {node.node_id}", "reason": plain(reason)})
        return missed
