"""The ClientApp: answers the server's question, trains, evaluates.

Only Flower's side of it: records in, records out. The work is `training.py`'s.
"""

import time
from dataclasses import replace
from pathlib import Path
from typing import cast

import flwr
import torch
import transformers
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from ravan_flwr.budgets import budget_share
from ravan_flwr.config import Config, read_config
from ravan_flwr.keys import AUTO
from ravan_flwr.methods.base import Tensors
from ravan_flwr.model import AdaptedModel
from ravan_flwr.payload import FIXED, from_record, hash_of, to_record
from ravan_flwr.plan import largest_share
from ravan_flwr.roster import Member, code_fingerprint
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.training import (
    LocalResult,
    LocalSteps,
    calibrate_locally,
    evaluate,
    train_locally,
)
from ravan_flwr.workbench import EVALUATION_BATCH, Examples, Workbench, get_workbench

app = ClientApp()


@app.query()
def query(message: Message, context: Context) -> Message:
    """Who this node is, what it has, and what it can afford."""
    node = _Node(context)
    bench = node.bench
    member = Member(
        node_id=context.node_id,
        partition_id=node.partition_id,
        num_partitions=node.num_partitions,
        examples=len(node.examples.train),
        share=node.share,
        device=str(bench.model.device),
        free_memory=_free_memory(bench.model.device),
        versions=f"flwr {flwr.__version__}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        code=code_fingerprint(),
        backbone=bench.model.backbone_fingerprint,
        derived=tuple(bench.model.seed_fingerprint),
    )
    return _reply(message, {"member": ConfigRecord(member.as_config())})


@app.train()
def train(message: Message, context: Context) -> Message:
    """A round of local steps from the server's broadcast."""
    started = time.perf_counter()
    node = _Node(context)
    _take_fixed(node.bench.model, message, context)
    # The share that this node named when it was asked: free memory may have changed since.
    share = cast(float, message.content.config_records["config"]["share"])
    result = train_locally(*node.work(message), share, node.steps, node.purpose(message))
    return _trained(message, node, result, started)


@app.train("calibrate")
def calibrate(message: Message, context: Context) -> Message:
    """What the method needs of this node's data before the first round."""
    started = time.perf_counter()
    node = _Node(context)
    steps = replace(node.steps, learning_rate=node.config.calibration_learning_rate)
    result = calibrate_locally(*node.work(message), steps, node.purpose(message))
    return _trained(message, node, result, started)


def _trained(message: Message, node: "_Node", result: LocalResult, started: float) -> Message:
    metrics = MetricRecord(
        {
            "round": _round_of(message),
            "train-loss": result.train_loss,
            "num-examples": len(node.examples.train),
            "derived": node.bench.model.derived,
            "seconds": time.perf_counter() - started,
        }
    )
    return _reply(message, {"arrays": to_record(result.upload), "metrics": metrics})


def _take_fixed(model: AdaptedModel, message: Message, context: Context) -> None:
    """The method's fixed tensors: sent once, then kept in this node's state for the run."""
    wanted = str(message.content.config_records["config"].get("fixed-hash", ""))
    if not wanted:
        return
    if FIXED in message.content:
        context.state[FIXED] = message.content.array_records[FIXED]
    if FIXED not in context.state:
        raise ValueError(
            f"this node does not have the fixed tensors {wanted}: it was started again since they "
            "were sent; the server sends them once more in its next round"
        )
    record = context.state.array_records[FIXED]
    if hash_of(record) != wanted:
        raise ValueError(
            f"fixed tensors have hash {hash_of(record)}, expected {wanted}; the server sends them "
            "once more in the node's next round"
        )
    model.load_fixed(wanted, from_record(record))


@app.evaluate()
def evaluate_(message: Message, context: Context) -> Message:
    """The global model on this node's own validation part."""
    node = _Node(context)
    model, number = node.bench.model, len(node.examples.validation)
    if not number:
        raise ValueError(
            f"partition {node.partition_id} has no validation part: got validation-share = "
            f"{node.config.validation_share}, expected above 0; set it"
        )
    _take_fixed(model, message, context)
    with model.holding(from_record(_arrays_of(message))):
        bench, examples = node.bench, node.examples.validation
        means = evaluate(model, bench.task, examples, EVALUATION_BATCH, bench.config.precision)
    metrics = MetricRecord({"round": _round_of(message), "num-examples": number, **means})
    return _reply(message, {"metrics": metrics})


class _Node:
    """This node: the run config with what its own node config changes."""

    def __init__(self, context: Context) -> None:
        config = read_config(context.run_config)
        settings = context.node_config
        for key in ("partition-id", "num-partitions"):
            if type(settings.get(key)) is not int:
                raise ValueError(
                    f"node config: {key} is {settings.get(key)!r}, expected a whole number; start "
                    'the SuperNode with --node-config "partition-id=0 num-partitions=2"'
                )
        self.partition_id = cast(int, settings["partition-id"])
        self.num_partitions = cast(int, settings["num-partitions"])
        if not 0 <= self.partition_id < self.num_partitions:
            raise ValueError(
                f"node config: partition-id is {self.partition_id}, expected 0 to "
                f"{self.num_partitions - 1} (num-partitions - 1); correct it"
            )
        if "device" in settings:
            config = replace(config, device=read_config({"device": settings["device"]}).device)
        self.config: Config = config
        self.budget = settings.get("budget")
        path = settings.get("data-path")
        if path is not None and not isinstance(path, str):
            raise ValueError(
                f"node config: data-path is {path!r}, expected the path of a folder as text; "
                "write it in quotation marks"
            )
        self.data_path = path

    @property
    def bench(self) -> Workbench:
        return get_workbench(self.config)

    @property
    def examples(self) -> Examples:
        if self.data_path is not None:
            return self.bench.own_examples(self.data_path, self.partition_id)
        return self.bench.partition(self.partition_id, self.num_partitions)

    @property
    def share(self) -> float:
        """The node's own budget if it has one, or its draw from the run's distribution."""
        budget, config = self.budget, self.config
        if budget is None:
            return budget_share(config.budgets, config.seed, self.partition_id)
        if budget == AUTO:
            return largest_share(config, _free_memory(self.bench.model.device))
        if isinstance(budget, bool) or not isinstance(budget, int | float) or not 0 < budget <= 1:
            raise ValueError(
                f"node config: budget is {budget!r}, expected a number above 0 and at most 1, or "
                "'auto'; correct it"
            )
        return float(budget)

    @property
    def steps(self) -> LocalSteps:
        config = self.config
        return LocalSteps(
            config.local_steps,
            config.batch_size,
            config.learning_rate,
            config.precision,
            config.proximal_mu,
        )

    def work(self, message: Message) -> tuple[AdaptedModel, Task, Encoded, Tensors]:
        """What every kind of local work begins with."""
        bench, broadcast = self.bench, from_record(_arrays_of(message))
        return bench.model, bench.task, self.examples.train, broadcast

    def purpose(self, message: Message) -> tuple[int, int, int]:
        """What all randomness of this work is a function of."""
        return self.config.seed, _round_of(message), self.partition_id


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":") for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return 0


def _round_of(message: Message) -> int:
    return cast(int, message.content.config_records["config"]["round"])


def _arrays_of(message: Message) -> ArrayRecord:
    return message.content.array_records["arrays"]


def _reply(
    message: Message, records: dict[str, ArrayRecord | ConfigRecord | MetricRecord]
) -> Message:
    return Message(RecordDict(records), reply_to=message)
