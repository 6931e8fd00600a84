"""Estimate how long training takes on this machine, from what a step computes.

A forward pass runs on the meta device, where its operations are counted and nothing is computed.
Three of this machine's speeds are timed, a fraction of a second each: of a product as wide as the
model, of an operation on each number, and of one with nothing to do. A step takes a few times what
the products, the other numbers and the operations of a forward pass take at these speeds.
Evaluation, messages and waiting come on top.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from ravan_flwr.config.checks import trains_backbone
from ravan_flwr.config.run_config import Config
from ravan_flwr.seeding import generator
from ravan_flwr.tasks import TASKS
from ravan_flwr.tasks.base import Shapes
from ravan_flwr.training.attention import attention_of
from ravan_flwr.training.clients import number_of_clients
from ravan_flwr.training.cost import Skeleton, meta_batch
from ravan_flwr.training.device import computing_with, most_workers, suitable_threads
from ravan_flwr.training.network import DTYPES, likely_device

_WHILE = 0.1  # seconds that each speed is timed
_ROWS = 4_096  # of a product, at most
_FEW = 16  # rows that say how long all would take
_LONGEST = 10  # seconds of a product of all rows
_NUMBERS = 2**20  # of an operation on each number


@dataclass(frozen=True)
class Pace:
    """Hold how long a step takes on this machine, and how many clients take one at a time."""

    step: float  # seconds
    at_a_time: int


class _Counted(TorchDispatchMode):
    """Count operations, and the numbers that they make."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of PyTorch
        self.operations, self.numbers = 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        self.operations += 1
        if isinstance(made, torch.Tensor):
            self.numbers += made.numel()
        return made


def pace_of(config: Config) -> Pace:
    """Count a step, and time this machine."""
    built = Skeleton.build(config)
    network, method, task = built.network, built.largest_round(), built.task
    method.choose(built.adapters, 1.0, generator(0), lambda: None)
    number = config.micro_batch_size or config.batch_size
    shapes = task.shapes(network.config, number)
    batch = meta_batch(network, task, number)
    network.train()
    counted, products = _Counted(), FlopCounterMode(display=False)
    with attention_of(config, network, task), products, counted:
        task.loss(network, batch)

    device = likely_device(config.device)
    alone = suitable_threads(method.size, config.batch_size)
    there = config.num_clients or number_of_clients(config)
    workers = most_workers(config, there, alone, on_cpu=device == "cpu")
    side = method.layers[0].in_features
    rows = _rows_of(shapes)
    dtype = DTYPES[config.precision]
    with computing_with(workers.threads), torch.no_grad():
        left = torch.ones(rows, side, dtype=dtype, device=device)
        right = torch.ones(side, side, dtype=dtype, device=device)
        if _is_slow(left, right):  # as some processors are in bfloat16
            left = left[:_FEW]
        product = _timed(lambda: left @ right) / (2 * left.numel() * side)
        many, single = (torch.ones(n, device=device) for n in (_NUMBERS, 1))
        on_each = _timed(lambda: many * 2) / _NUMBERS
        nothing = _timed(lambda: single * 2)
    forward = products.get_total_flops() * product
    forward += counted.numbers * on_each + counted.operations * nothing
    # A backward pass takes as long again, and once more where weights have gradients as well. Half
    # of a forward pass is the reference's, where there is one, which has no backward pass.
    learned = 0.5 if TASKS[config.task].has_reference else 1.0
    passes = 1 + learned * (1 + trains_backbone(vars(config)) + config.gradient_checkpointing)
    return Pace(passes * forward * math.ceil(config.batch_size / number), workers.number)


def _is_slow(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Say whether a product would take too long, by a few of its rows."""
    few = left[:_FEW]
    for _ in range(2):  # the first one is slower
        started = time.perf_counter()
        (few @ right).sum().item()
        seconds = time.perf_counter() - started
    return seconds * len(left) / len(few) > _LONGEST


def _rows_of(shapes: Shapes) -> int:
    """Choose how many rows are multiplied: about as many as a batch has tokens."""
    return min(_ROWS, max(math.prod(shape) for shape, _ in shapes.values()))


def _timed(work: Callable[[], object]) -> float:
    """Time a piece of work: the mean of as many repetitions as fit, after a first one."""

    def finished() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    work()
    started, number = finished(), 0
    while finished() - started < _WHILE:
        work()
        number += 1
    return (finished() - started) / number


def time_of_rounds(config: Config, rounds: int = 1) -> float:
    """Estimate the seconds that clients train in so many rounds; ValueError if nothing says it."""
    if not config.local_steps:
        raise ValueError("the steps of a pass depend on the examples")
    device = likely_device(config.device)
    if device != "cpu" and not torch.cuda.is_available():
        raise ValueError(f"there is no {device} device here")
    pace = pace_of(config)
    there = config.num_clients or number_of_clients(config)
    turns = math.ceil(config.asked_of(there) / pace.at_a_time)
    return rounds * turns * config.local_steps * pace.step
