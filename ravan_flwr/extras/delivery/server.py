"""Deliver the run's result to every connected node, and record which nodes have it.

The run is over then, and its result is on disk. A node's failure affects only its own entry in
`summary.json`. Every failure here is recorded there, and does not make the run fail.
"""

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from logging import getLogger

from flwr.app import Message, MessageType
from flwr.serverapp import Grid
from torch import Tensor

from ravan_flwr.config.run_config import Config
from ravan_flwr.extras.delivery.parcel import Parcel, check_run_name, read_answer
from ravan_flwr.messages.arrays import to_record
from ravan_flwr.messages.plain_text import listed, plain
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.tensors import Tensors, checksum
from ravan_flwr.runs.callback import Callback
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Delivered, RoundRecord, Summary
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.round import MessageBuilder, Round, Sent
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.runtime import in_process
from ravan_flwr.server.superlink_calls import install_object_check, retry_failed_calls
from ravan_flwr.server.update import as_value_error, read_content
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)

KIND = f"{MessageType.QUERY}.deliver"
NO_RESULT_PATH = "its node config has no result-path"
ALL = "all"  # in place of a client: the delivery failed for every client
NOT_CONNECTED = "it was not connected when the result was delivered"
LATER = "It can be delivered later: ravan-flwr deliver RUN SUPERLINK"


# The keys of a private run's summary that devices get, for the model card. Some other keys reveal
# which clients took part, or how many, and no privacy account covers that.
PUBLISHED = (
    "method", "preset", "seed", "num-clients", "rounds", "rank", "trainable-parameters", "metrics",
    "unit", "epsilon", "delta", "noise-multiplier", "noise-cohort",
)  # fmt: skip


def make_parcel(directory: RunDirectory, state: Tensors, summary: Summary) -> Parcel:
    """Return the description of a run's result that devices get.

    Raise ValueError if the run's name is not valid as a folder's name on a device.
    """
    excluded = {"delivered", "not-delivered", "run-id"}
    public = PUBLISHED if "epsilon" in summary else summary.keys() - excluded
    excerpt = {k: v for k, v in summary.items() if k in public}
    return Parcel(
        run=check_run_name(directory.path.name),
        run_id=summary.setdefault("run-id", secrets.token_hex(8)),
        last_round=summary["rounds"],
        checksum=checksum(state),
        summary=json.dumps(excerpt),
    )


@dataclass
class DeliverAtEnd(Callback):
    """Deliver the result when the run has ended."""

    grid: Grid
    config: Config
    registry: ClientRegistry
    message_builder: MessageBuilder
    directory: RunDirectory
    state: Tensors  # of the last round

    def on_round_end(self, record: RoundRecord, state: Mapping[str, Tensor]) -> None:  # noqa: ARG002
        self.state = dict(state)

    def on_run_end(self) -> None:
        self.deliver(self.directory.read_summary())

    def deliver(self, summary: Summary) -> None:
        """Deliver the state; add to `summary.json` which clients have it and which do not.

        A disconnected client keeps the result of an earlier delivery.
        """
        have: dict[str, Delivered] = {}
        try:
            parcel = make_parcel(self.directory, self.state, summary)
            have, missed = self._to_all(parcel)
            _log_delivery(have, missed)
        except Exception as error:  # noqa: BLE001 (the result is safe, and the run has not failed)
            log.warning("the result was not delivered: %s. %s", error, LATER)
            missed = {ALL: plain(str(error))}
        for entry in summary.get("delivered", ()):
            name = f"partition {entry['partition-id']}"
            if missed.get(name, NOT_CONNECTED) == NOT_CONNECTED:
                have.setdefault(name, entry)
        for rejection in summary.get("not-delivered", ()):
            if rejection["client"] != ALL:
                missed.setdefault(rejection["client"], rejection["reason"])
        summary["delivered"] = sorted(have.values(), key=lambda entry: entry["partition-id"])
        summary["not-delivered"] = [
            {"client": name, "reason": missed[name]}
            for name in sorted(missed.keys() - have.keys(), key=_by_number)
        ]
        try:
            self.directory.write_json("summary.json", summary)
        except OSError as error:
            log.warning("the devices that have the result are not in summary.json: %s", error)

    def _to_all(self, parcel: Parcel) -> tuple[dict[str, Delivered], dict[str, str]]:
        """Send the result to every connected client with a result path, whatever its budget.

        Return the clients that have it, and the reasons why others do not, by name.
        """
        config, registry, number = self.config, self.registry, parcel.last_round
        registry.catch_up(self.grid)
        present = registry.present(self.grid)
        notes = _Notes(number, registry.partitions)
        round_ = Round(config, self.message_builder, notes, self.grid)
        arrays, settings = to_record(self.state), parcel.as_config()
        messages = [
            self.message_builder.message(client, KIND, number, arrays, settings)
            for client in present
            if client.keeps_result
        ]

        def read(reply: Message, sent: Sent) -> Delivered:
            with as_value_error():
                folder = read_answer(read_content(reply).config_records["kept"], parcel)
                return {"partition-id": sent.client.partition_id, "folder": folder}

        replies = round_.replies(messages)
        have = [delivered for _, delivered in round_.valid(replies, read)]
        missed = {entry["client"]: entry["reason"] for entry in notes.rejected}
        missed |= {
            f"partition {client.partition_id}": NO_RESULT_PATH
            for client in present
            if not client.keeps_result
        }
        node_ids = {client.node_id for client in present}
        for node in registry.nodes.values():
            if node.node_id not in node_ids and node.client is not None:
                missed[f"partition {node.client.partition_id}"] = NOT_CONNECTED
            elif node.client is None:
                reason = f"refused: {node.refused}" if node.refused else "it answered no query"
                missed[f"node {node.node_id}"] = plain(reason)
        return {f"partition {entry['partition-id']}": entry for entry in have}, missed


def deliver_later(
    grid: Grid, loaded: ModelAndData, config: Config, directory: RunDirectory, start: ResumePoint
) -> None:
    """Deliver a finished run's result to the nodes connected now; change nothing else of it."""
    registry = ClientRegistry(config, loaded, for_training=False)
    if not in_process(grid):
        install_object_check()
        retry_failed_calls(grid, config.round_timeout)
    registry.gather(grid, wait=True)
    builder = MessageBuilder(registry.nodes, start.fixed)
    DeliverAtEnd(grid, config, registry, builder, directory, start.state).on_run_end()
    log.info("run directory: %s", directory.path)


class _Notes(RoundLog):
    """Note the clients that could not keep the result, with reasons; log no line for each."""

    def reject(self, client: RegisteredClient, reason: object) -> None:
        name = f"partition {client.partition_id}"
        self.rejected.append({"client": name, "reason": plain(str(reason))})


def _log_delivery(have: Mapping[str, Delivered], missed: Mapping[str, str]) -> None:
    """Log which clients have the result, how many want none, and which could not keep it."""
    has = [str(number) for number in sorted(entry["partition-id"] for entry in have.values())]
    failed = [name for name in sorted(missed, key=_by_number) if missed[name] != NO_RESULT_PATH]
    without = len(missed) - len(failed)
    log.info(
        "result delivered to %s%s",
        f"partition{'s' * (len(has) > 1)} {listed(has, 20, ', ')}" if has else "no client",
        f"; {without} without result-path in the node config" if without else "",
    )
    if failed:
        reasons = listed(f"{name}: {missed[name]}" for name in failed)
        log.warning("not delivered to %d: %s. %s", len(failed), reasons, LATER)


def _by_number(name: str) -> tuple[bool, int]:
    """Return a sort key: partitions by their numbers, other names after them."""
    word, _, number = name.partition(" ")
    return word != "partition", int(number or 0)
