"""Answer the server: who this client is, its training, its evaluation, the result that it keeps.

Records in, records out, in whatever process. The work is done by `training/`.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from logging import getLogger
from pathlib import Path
from typing import Any, cast

import flwr
import numpy as np
import psutil
import torch
import transformers
from flwr.app import ConfigRecord, Context, MetricRecord, RecordDict

from ravan_flwr.client.example_account import SpentError, take_part
from ravan_flwr.client.noise_account import NoiseAccount
from ravan_flwr.client.own_part import find_own, keep_own, run_mark
from ravan_flwr.client.secure_part import SecurePart, node_keys, pieces_in
from ravan_flwr.config.insisting import check_insisted, limit_of
from ravan_flwr.config.keys import AUTO
from ravan_flwr.config.node_config import read_node
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.messages.arrays import FIXED, from_record, to_record
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.member import Member
from ravan_flwr.messages.parcel import kept, not_kept, read_parcel
from ravan_flwr.messages.pieces import read_pieces, to_pieces
from ravan_flwr.messages.wire import decode, encode, wire_of_round
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.budgets import budget_share
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.cost import largest_share
from ravan_flwr.training.local_steps import (
    LocalResult,
    LocalSteps,
    calibrate_locally,
    measured_sums,
    steps_of,
    train_locally,
)
from ravan_flwr.training.masked import (
    by_tensor,
    check_given,
    check_parts,
    parts_of,
    to_numbers,
)
from ravan_flwr.training.noised import noise_in, noised_parts, to_noised
from ravan_flwr.training.private_steps import sampling_rate, train_privately
from ravan_flwr.training.workbench import Examples, Workbench, get_workbench

log = getLogger(__name__)


def answer(kind: str, content: RecordDict, context: Context) -> RecordDict:
    """Answer a message: `query`, `train`, `masked`, `calibrate`, `evaluate` or `deliver`."""
    client = _Client(content, context)
    _check_kind(kind, client.config)
    return _ANSWERS[kind](client)


def _check_kind(kind: str, config: Config) -> None:
    """Refuse what a run of these settings does not ask: a server that does asks for too much."""
    able = ["train", "calibrate", "evaluate"]
    why = "secure-aggregation = false"
    if config.secure_aggregation:
        why, able = "secure-aggregation = true", ["masked"]
    elif config.privacy == "example":
        why, able = "privacy = 'example'", ["train"]
    if kind not in ("query", "deliver", *able):
        raise ValueError(
            f"{why}: got a message that asks to {kind!r}, expected {' or '.join(able)}; the server "
            "does not do as the run's settings say"
        )


def forget() -> None:
    """Read model and examples anew for the next message."""
    get_workbench.cache_clear()


class _Client:
    """Hold a message and the node that it came to: the run config, with what the node changes."""

    def __init__(self, content: RecordDict, context: Context) -> None:
        self.started = time.perf_counter()
        self.content, self.context = content, context
        self.node = read_node(context.node_config)
        config = read_config(context.run_config)
        self.config = replace(config, device=self.node.device or config.device)
        check_insisted(self.node, config)
        if self.node.data_path is not None and not config.data.settled:
            raise ValueError(
                f"preset {config.preset}: it leaves the labels to the data, but this device has "
                "examples of its own, expected the labels of all devices; write them into the "
                "preset, `labels: [...]` under `data`, as `ravan-flwr new` does"
            )
        if self.node.data_path is not None and METHODS[config.method].pools:
            raise ValueError(
                f"method {config.method!r}: this device has examples of its own, which stay there, "
                "expected clients that share one data set; choose another method, or simulate"
            )

    @property
    def bench(self) -> Workbench:
        return get_workbench(self.config)

    @property
    def examples(self) -> Examples:
        node = self.node
        if node.data_path is not None:
            return self.bench.own_examples(node.data_path, node.partition_id)
        return self.bench.partition(node.partition_id, node.num_partitions)

    @property
    def trained_on(self) -> Encoded:
        """Get what a round trains on: the client's own examples, or those of all."""
        if METHODS[self.config.method].pools:
            return self.bench.pooled(self.node.num_partitions)
        return self.examples.train

    @property
    def share(self) -> float:
        """Find the node's own budget if it has one, or its draw from the run's distribution."""
        budget, config = self.node.budget, self.config
        if budget is None:
            return budget_share(config.budgets, config.seed, self.node.partition_id)
        if budget == AUTO:
            return largest_share(config, _free_memory(self.bench.model.device))
        return float(budget)

    @property
    def granted(self) -> float:
        """Read the share that this node named when it was asked: free memory may have changed."""
        return cast(float, self.content.config_records["config"]["share"])

    @property
    def steps(self) -> LocalSteps:
        return steps_of(self.config, self.round, len(self.examples.train))

    @property
    def round(self) -> int:
        return cast(int, self.content.config_records["config"]["round"])

    @property
    def work(self) -> tuple[AdaptedModel, Task, Encoded, Tensors]:
        """Collect what every kind of local work begins with."""
        bench = self.bench
        return bench.model, bench.task, self.trained_on, self.broadcast

    @property
    def broadcast(self) -> Tensors:
        sent = from_record(self.content.array_records["arrays"])
        return decode(sent, self.wire)

    @property
    def wire(self) -> str:
        return wire_of_round(self.config.wire, self.round)

    @property
    def turn(self) -> ClientRound:
        return ClientRound(self.config.seed, self.round, self.node.partition_id)

    @property
    def mark(self) -> str:
        return run_mark(self.config, self.context.run_id)

    def find_own(self) -> Tensors | None:
        """Find the part of the model that has stayed with this client, if one has."""
        model = self.bench.model
        return find_own(self.context.state, model, self.mark) if model.own_shapes() else None

    def take_fixed(self) -> None:
        """Load the fixed tensors: sent once, then kept in this node's state for the run."""
        wanted = str(self.content.config_records["config"].get("fixed-hash", ""))
        if not wanted:
            return
        state = self.context.state
        if FIXED in self.content:
            state[FIXED] = self.content.array_records[FIXED]
        if FIXED not in state:
            raise ValueError(
                f"this node does not have the fixed tensors {wanted}: it was started again since "
                "they were sent; the server sends them once more in its next round"
            )
        self.bench.model.load_fixed(from_record(state.array_records[FIXED]), wanted)


def _query(client: _Client) -> RecordDict:
    bench, node = client.bench, client.node
    if client.config.secure_aggregation:
        node_keys(node).public()  # refused, if at all, before a round
    member = Member(
        node_id=client.context.node_id,
        partition_id=node.partition_id,
        num_partitions=node.num_partitions,
        own_data=node.data_path is not None,
        examples=len(client.examples.train),
        share=client.share,
        device=str(bench.model.device),
        free_memory=_free_memory(bench.model.device),
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        code=code_fingerprint(),
        backbone=bench.backbone_fingerprint,
        derived=tuple(bench.model.seed_fingerprint),
        keeps_result=node.result_path is not None,
    )
    return RecordDict({"member": ConfigRecord(member.as_config())})


def _train(client: _Client) -> RecordDict:
    client.take_fixed()
    if client.config.privacy == "example":
        return _train_privately(client)
    own = client.find_own()
    result = train_locally(*client.work, client.granted, client.steps, client.turn, own)
    reply = _trained(client, result)
    if result.own:
        keep_own(client.context.state, result.own, client.mark)
        reply.metric_records["metrics"]["began-anew"] = int(own is None)
    return reply


def _train_privately(client: _Client) -> RecordDict:
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
    result = train_privately(*client.work, client.granted, client.steps, client.turn, noise)
    reply = _trained(client, result)
    reply.metric_records["metrics"]["recounted"] = int(recounted)
    return reply


def _masked(client: _Client) -> RecordDict:
    """Train the rows that the schedule of a secure round says, and mask how they changed."""
    parts = read_pieces(pieces_in(client.content), ("here", "sealed", "marks"))
    with SecurePart(client.context, client.node) as secure:
        schedule, rows = secure.take_shares(client.round, parts)
    sent, method = client.broadcast, client.bench.model.method
    check_given(replace(client.bench.config, rank=method.rank), sent, schedule)
    random = np.random.default_rng(client.turn.derive("rounding"))
    work, steps = client.work, client.steps
    if client.config.privacy == "client":
        noise = noise_in(client.config, schedule)
        check_parts(noised_parts(method, sent, noise), schedule)
        node, context = client.node, client.context
        account = NoiseAccount(context.state, context.run_id, node.partition_id)
        account.spend(node, schedule.shown)
        result = train_locally(*work, client.granted, steps, client.turn)
        numbers = to_noised(method, sent, result.upload, schedule, random)
    else:
        check_parts(parts_of(method, sent, 1.0), schedule)
        chosen = by_tensor(schedule, rows)
        result = train_locally(*work, client.granted, steps, client.turn, rows=chosen)
        numbers = to_numbers(method, sent, result.upload, schedule, rows, random)
    with SecurePart(client.context, client.node) as secure:
        masked = secure.mask(client.round, numbers)
    told = {
        "round": client.round,
        "derived": client.bench.model.derived,
        "seconds": time.perf_counter() - client.started,
    }
    arrays = to_pieces({"masked": masked})
    return RecordDict({"arrays": arrays, "metrics": MetricRecord(cast(Any, told))})


def _calibrate(client: _Client) -> RecordDict:
    steps = replace(client.steps, learning_rate=client.config.calibration_learning_rate)
    return _trained(client, calibrate_locally(*client.work, steps, client.turn))


def _trained(client: _Client, result: LocalResult) -> RecordDict:
    upload = encode(result.upload, client.wire, client.turn.generator("wire up"))
    told: dict[str, Any] = {
        "round": client.round,
        "derived": client.bench.model.derived,
        "seconds": time.perf_counter() - client.started,
    }
    if client.config.privacy == "none":
        told |= {"train-loss": result.train_loss, "num-examples": len(client.trained_on)}
    metrics = MetricRecord(told)
    return RecordDict({"arrays": to_record(upload), "metrics": metrics})


def _evaluate(client: _Client) -> RecordDict:
    bench, examples = client.bench, client.examples.validation
    if not len(examples):
        raise ValueError(
            f"partition {client.node.partition_id} has no validation part: got validation-share = "
            f"{client.config.validation_share}, expected above 0; set it"
        )
    client.take_fixed()
    with bench.model.holding(client.broadcast, client.find_own()):
        size, precision = bench.task.evaluation_batch, client.config.precision
        sums = measured_sums(bench.model, bench.task, examples, size, precision)
    means, unit = bench.task.means(sums, len(examples)), bench.task.unit
    told: dict[str, float] = {name: means[name] for name in bench.task.told}
    told |= {f"num-{unit}": sums[unit]} if unit in sums else {}
    metrics = MetricRecord({"round": client.round, "num-examples": len(examples), **told})
    return RecordDict({"metrics": metrics})


def _deliver(client: _Client) -> RecordDict:
    """Keep the run's result; whatever prevents that is told, and costs nothing else."""
    try:
        answer = _keep(client)
    except Exception as error:  # noqa: BLE001 (a full disk, what is damaged, memory that ran out)
        place = client.node.result_path or "(no result-path)"
        log.warning("the run's result is not kept in %s: %s", place, error)
        answer = not_kept(_without_paths(error))
    return RecordDict({"kept": ConfigRecord(answer)})


def _keep(client: _Client) -> dict[str, Any]:
    from ravan_flwr.results.keeping import keep_result  # noqa: PLC0415 (no round needs it)

    node = client.node
    parcel = read_parcel(client.content.config_records["config"])
    if node.result_path is None:
        raise ValueError("its node config has no result-path")
    client.take_fixed()
    state = from_record(client.content.array_records["arrays"])
    own = client.find_own()
    if own is None and client.bench.model.own_shapes():
        raise ValueError(
            "this device has no part of the model of its own: it has not trained in this run, or "
            "was started again since; expected deliver=true in a run in which it trains"
        )
    place, writer = Path(node.result_path), str(node.partition_id)
    form = node.result_form
    return kept(parcel, keep_result(place, parcel, state, client.bench, form, writer, own))


def _without_paths(error: Exception) -> str:
    """Tell an error to the server, which is told no paths of a device."""
    if isinstance(error, OSError):
        return f"its result-path cannot be written to: {error.strerror or type(error).__name__}"
    return str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"


_ANSWERS: dict[str, Callable[[_Client], RecordDict]] = {
    "query": _query,
    "train": _train,
    "masked": _masked,
    "calibrate": _calibrate,
    "evaluate": _evaluate,
    "deliver": _deliver,
}


def _free_memory(device: torch.device) -> int:
    """Return the bytes that a client may take on its device: a GPU's, or the machine's."""
    if device.type == "cuda":
        # What PyTorch holds and does not use is free for this process.
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + held
    return int(psutil.virtual_memory().available)
