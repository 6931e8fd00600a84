"""Give every connected node the run's result to keep, and write down who has it.

The run is over then, and its own result is on disk: whatever a node does costs its own entry in
`summary.json`, and whatever fails here is told there and does not make the run fail.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger

from flwr.app import Message, MessageType
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
from ravan_flwr.runs.record import Delivered, Metrics, RoundRecord, Summary
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.replies import as_value_error, content_of
from ravan_flwr.server.reply_collector import MessageBuilder, ReplyCollector
from ravan_flwr.server.reply_fetcher import RoundDeadline, in_process
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.status import Status

log = getLogger(__name__)

KIND = f"{MessageType.QUERY}.deliver"
NO_PLACE = "its node config has no result-path"
ALL = "all"  # in place of a client: nobody could have it
AWAY = "it was not connected when the result was delivered"
LATER = "It can be delivered later: ravan-flwr deliver RUN SUPERLINK"


# What a device is told of a private run, which its model card says. Of the rest some tells who took
# part, or how many, and no account covers that.
PUBLISHED = (
    "method", "preset", "seed", "num-clients", "rounds", "rank", "trainable-parameters", "metrics",
    "unit", "epsilon", "delta", "noise-multiplier", "noise-cohort",
)  # fmt: skip


def make_parcel(
    directory: RunDirectory, state: Tensors, summary: Summary, shown: Metrics | None = None
) -> Parcel:
    """Describe a run's result; ValueError if its name cannot be that of a device's folder."""
    kept_back = {"delivered", "not-delivered", "run-id"}
    public = PUBLISHED if "epsilon" in summary else summary.keys() - kept_back
    excerpt = {k: v for k, v in summary.items() if k in public}
    if shown is not None:
        excerpt["metrics"] = {**summary["metrics"], "final": shown}
    return Parcel(
        run=check_run_name(directory.path.name),
        run_id=summary.setdefault("run-id", new_run_id()),
        last_round=summary["rounds"],
        checksum=checksum(state),
        summary=json.dumps(excerpt),
    )


@dataclass
class DeliverAtEnd(Callback):
    """Deliver the result of a run when it has ended."""

    grid: Grid
    config: Config
    registry: ClientRegistry
    message_builder: MessageBuilder
    status: Status
    directory: RunDirectory
    state: Tensors  # that of the last round, or of a run without a further one

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.state = dict(state)

    def on_run_end(self) -> None:
        summary = self.directory.read_summary()
        self.hand_out(summary, measured(summary, self.directory))

    def hand_out(self, summary: Summary, shown: Metrics | None = None) -> None:
        """Deliver the state, and add to `summary.json` who has it and who could not have it.

        `shown` are the metrics for the devices' model cards, where they are not those of the
        summary. Who had the result at an earlier delivery and is away now has it still.
        """
        have: dict[str, Delivered] = {}
        try:
            parcel = make_parcel(self.directory, self.state, summary, shown)
            have, missed = self._to_all(parcel)
            _tell(have, missed)
        except Exception as error:  # noqa: BLE001 (the result is safe, and the run has not failed)
            log.warning("the result was not delivered: %s. %s", error, LATER)
            missed = {ALL: plain(str(error))}
        failures = {name for name, reason in missed.items() if reason != AWAY}
        before = {
            f"partition {entry['partition-id']}": entry for entry in summary.get("delivered", ())
        }
        have = {name: entry for name, entry in before.items() if name not in failures} | have
        earlier = {entry["client"]: entry["reason"] for entry in summary.get("not-delivered", ())}
        missed = {name: why for name, why in (earlier | missed).items() if name not in have}
        if ALL not in failures:
            missed.pop(ALL, None)
        summary["delivered"] = sorted(have.values(), key=lambda entry: entry["partition-id"])
        summary["not-delivered"] = [
            {"client": name, "reason": missed[name]} for name in sorted(missed, key=_by_number)
        ]
        try:
            self.directory.write_json("summary.json", summary)
        except OSError as error:
            log.warning("the devices that have the result are not in summary.json: %s", error)

    def _to_all(self, parcel: Parcel) -> tuple[dict[str, Delivered], dict[str, str]]:
        """Send it to every client that is connected and has a place for it, whatever its budget.

        Return what clients have it, and why others have not.
        """
        config, registry, number = self.config, self.registry, parcel.last_round
        registry.catch_up(self.grid)
        present = registry.present(self.grid)
        notes = _Notes(number, registry.partitions)
        collector = ReplyCollector(self.message_builder, notes, self.status)
        arrays, settings = to_record(self.state), parcel.as_config()
        messages = [
            self.message_builder.message(client, KIND, number, arrays, settings)
            for client in present
            if client.keeps_result
        ]

        def deadline(clients: int) -> RoundDeadline:
            """Wait as a round does: for stragglers, and no longer than its timeout."""
            grace = math.inf if in_process(self.grid) else config.straggler_grace
            return RoundDeadline(config.round_timeout, clients, config.min_replies, grace)

        def check(reply: Message, client: RegisteredClient) -> Delivered:
            with as_value_error():
                folder = read_answer(content_of(reply).config_records["kept"], parcel)
                return {"partition-id": client.partition_id, "folder": folder}

        have: list[Delivered] = []
        collector.take(collector.replies(self.grid, messages, deadline), check, have.append)
        missed = {entry["client"]: entry["reason"] for entry in notes.rejected}
        missed |= {f"partition {m.partition_id}": NO_PLACE for m in present if not m.keeps_result}
        node_ids = {client.node_id for client in present}
        for node in registry.nodes.values():
            if node.node_id not in node_ids and node.client is not None:
                missed[f"partition {node.client.partition_id}"] = AWAY
            elif node.client is None:
                reason = f"refused: {node.refused}" if node.refused else "it answered no query"
                missed[f"node {node.node_id}"] = plain(reason)
        return {f"partition {entry['partition-id']}": entry for entry in have}, missed


class _Notes(RoundLog):
    """Note who could not keep the result, and why."""

    def reject(self, client: RegisteredClient, reason: object) -> None:
        name = f"partition {client.partition_id}"
        self.rejected.append({"client": name, "reason": plain(str(reason))})


def _tell(have: Mapping[str, Delivered], missed: Mapping[str, str]) -> None:
    """Log who has it and how many want none in one line, in another who could not."""
    has = [str(number) for number in sorted(entry["partition-id"] for entry in have.values())]
    could_not = [name for name in sorted(missed, key=_by_number) if missed[name] != NO_PLACE]
    without = len(missed) - len(could_not)
    log.info(
        "result delivered to %s%s",
        f"partition{'s' * (len(has) > 1)} {listed(has, 20, ', ')}" if has else "nobody",
        f"; {without} without result-path in the node config" if without else "",
    )
    if could_not:
        reasons = listed(f"{name}: {missed[name]}" for name in could_not)
        log.warning("not delivered to %d: %s. %s", len(could_not), reasons, LATER)


def _by_number(name: str) -> tuple[bool, int]:
    """Sort partitions by their numbers, and after them what has none."""
    kind, _, number = name.partition(" ")
    return kind != "partition", int(number or 0)
