"""Answer the server: who this client is, its training, its evaluation, the result that it keeps.

Records in, records out, in whatever process. The work is done by `training/`.
"""

from collections.abc import Callable
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any

import flwr
import torch
import transformers
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from ravan_flwr.client.account import SpentError, take_part
from ravan_flwr.client.client_request import ClientRequest, keep_own
from ravan_flwr.client.masked import train_masked
from ravan_flwr.client.on_device import is_on_a_device
from ravan_flwr.client.secure_part import node_keys
from ravan_flwr.config.node_config import limit_of
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.parcel import confirmation, read_parcel, refusal
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.messages.sparsity import WHOLE, change_of, sparsify
from ravan_flwr.messages.wire import encode
from ravan_flwr.training.local_steps import (
    LocalResult,
    calibrate_locally,
    measured_sums,
    train_locally,
)
from ravan_flwr.training.model_and_data import get_model_and_data
from ravan_flwr.training.private_steps import (
    check_examples_apart,
    sampling_rate,
    train_privately,
)

log = getLogger(__name__)


def answer(kind: str, content: RecordDict, context: Context) -> RecordDict:
    """Answer a message: `query`, `train`, `masked`, `calibrate`, `evaluate` or `deliver`."""
    client = ClientRequest(content, context)
    # A server that asks for what a run of these settings does not ask asks for too much.
    able, why = ["train", "calibrate", "evaluate"], "secure-aggregation = false"
    if client.config.secure_aggregation:
        why, able = "secure-aggregation = true", ["masked"]
    elif client.config.privacy == "example":
        why, able = "privacy = 'example'", ["train"]
    if kind not in ("query", "deliver", *able):
        raise ValueError(
            f"{why}: got a message that asks to {kind!r}, expected {' or '.join(able)}; the server "
            "does not do as the run's settings say"
        )
    return _ANSWERS[kind](client)


def forget() -> None:
    """Read model and examples anew for the next message."""
    get_model_and_data.cache_clear()


def _query(client: ClientRequest) -> RecordDict:
    loaded, node = client.loaded, client.node
    # What is refused is refused before a round.
    if client.config.secure_aggregation:
        node_keys(node).public()
    if client.config.privacy == "example":
        check_examples_apart(loaded.model, loaded.task)
    fraction = (
        client.budget_fraction
    )  # "auto" follows from memory, which examples will take a part of
    registered = RegisteredClient(
        node_id=client.context.node_id,
        partition_id=node.partition_id,
        num_partitions=node.num_partitions,
        own_data=node.data_path is not None,
        examples=len(client.examples.train),
        budget_fraction=fraction,
        device=str(loaded.model.device),
        # How much examples take is not told where the server is not trusted.
        free_memory=0 if client.config.privacy == "example" else client.free_memory,
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        code=code_fingerprint(),
        backbone=loaded.backbone_fingerprint,
        derived=tuple(loaded.model.seed_fingerprint),
        keeps_result=node.result_path is not None,
    )
    return RecordDict({"client": ConfigRecord(registered.as_config())})


def _train(client: ClientRequest) -> RecordDict:
    client.take_fixed()
    if client.config.privacy == "example":
        return _train_privately(client)
    own = client.find_own()
    result = train_locally(*client.work, client.granted, client.steps, client.turn, own)
    reply = _trained(client, result)
    if result.own:
        keep_own(client.context.state, result.own)
        reply.metric_records["metrics"]["began-anew"] = int(own is None)
    return reply


def _train_privately(client: ClientRequest) -> RecordDict:
    """Train with private steps, once they are accounted for; or say that no room is left."""
    message = client.content.config_records["config"]
    limited = replace(client.config, epsilon=limit_of(client.node, client.config.epsilon))
    rate = sampling_rate(client.config.batch_size, len(client.trained_on))
    try:
        noise, recounted = take_part(
            client.context.state, client.mark, limited, rate, message, client.node.partition_id
        )
    except SpentError as error:
        log.info("this client trains no further: %s", error)
        refused = ConfigRecord({"round": client.round, "reason": str(error)})
        return RecordDict({"refused": refused})
    steps = client.steps
    if is_on_a_device():
        # Company changes the rounding of an example's gradient, and a server can send a state that
        # makes anything of that. By itself none depends on another, whatever the state.
        steps = replace(steps, micro_batch_size=1)
    with client.keeping_reasons():
        result = train_privately(*client.work, client.granted, steps, client.turn, noise)
        reply = _trained(client, result)
    reply.metric_records["metrics"]["recounted"] = int(recounted)
    return reply


def _calibrate(client: ClientRequest) -> RecordDict:
    steps = replace(client.steps, learning_rate=client.config.calibration_learning_rate)
    return _trained(client, calibrate_locally(*client.work, steps, client.turn))


def _trained(client: ClientRequest, result: LocalResult) -> RecordDict:
    sparse = result.upload
    if client.sparsity != WHOLE:  # the largest of what has changed, in place of what was trained
        method = client.loaded.model.method.in_round(client.round)
        change = change_of(method, result.upload, client.broadcast)
        sparse = sparsify(change, client.sparsity[1], change.keys())
    upload = encode(sparse, client.wire, client.turn.generator("wire up"))
    values = client.upload_metrics
    if client.config.privacy == "none":
        values |= {"train-loss": result.train_loss, "num-examples": len(client.trained_on)}
        values |= {"skipped-steps": result.skipped} if result.skipped else {}
    metrics = MetricRecord(values)
    return RecordDict({"arrays": to_record(upload), "metrics": metrics})


def _evaluate(client: ClientRequest) -> RecordDict:
    loaded, examples = client.loaded, client.examples.validation
    if not len(examples):
        raise ValueError(
            f"partition {client.node.partition_id} has no validation part: got validation-share = "
            f"{client.config.validation_share}, expected above 0; set it"
        )
    client.take_fixed()
    with loaded.model.holding(client.broadcast, client.find_own()):
        size, precision = loaded.task.evaluation_batch, client.config.precision
        sums = measured_sums(loaded.model, loaded.task, examples, size, precision)
    measures = loaded.task.measures
    means, unit = measures.means(sums, len(examples)), measures.unit
    reported: dict[str, float] = {name: means[name] for name in measures.names}
    reported |= {f"num-{unit}": sums[unit]} if unit in sums else {}
    metrics = MetricRecord({"round": client.round, "num-examples": len(examples), **reported})
    return RecordDict({"metrics": metrics})


def keep_delivered(client: ClientRequest) -> RecordDict:
    """Keep the run's result; whatever prevents that is told, and costs nothing else."""
    try:
        reply = _keep(client)
    except Exception as error:  # noqa: BLE001 (a full disk, what is damaged, memory that ran out)
        place = client.node.result_path or "(no result-path)"
        log.warning("the run's result is not kept in %s: %s", place, error)
        why = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        if isinstance(error, OSError):  # the server is told no paths of a device
            reason = error.strerror or type(error).__name__
            why = f"its result-path cannot be written to: {reason}"
        reply = refusal(why)
    return RecordDict({"kept": ConfigRecord(reply)})


def _keep(client: ClientRequest) -> dict[str, Any]:
    from ravan_flwr.reports.device_result import keep_result  # noqa: PLC0415 (no round needs it)

    node = client.node
    parcel = read_parcel(client.content.config_records["config"])
    if node.result_path is None:
        raise ValueError("its node config has no result-path")
    client.take_fixed()
    state = from_record(client.content.array_records["arrays"])
    own = client.find_own()
    if own is None and client.loaded.model.own_shapes():
        raise ValueError(
            "this device has no part of the model of its own: it has not trained in this run, or "
            "was started again since; expected deliver=true in a run in which it trains"
        )
    place, writer = Path(node.result_path), str(node.partition_id)
    form = node.result_form
    return confirmation(parcel, keep_result(place, parcel, state, client.loaded, form, writer, own))


_ANSWERS: dict[str, Callable[[ClientRequest], RecordDict]] = {
    "query": _query,
    "train": _train,
    "masked": train_masked,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
    "deliver": keep_delivered,
}
