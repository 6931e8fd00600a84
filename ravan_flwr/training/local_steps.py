"""Run a client's local steps of Adam on its own examples, or its evaluation."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import Config
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.extensions import sums_changes
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Batch, Columns, Encoded, Task
from ravan_flwr.tasks.extensions import Classification, Packs, Predicts, task_with
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.batching import evaluation_batches, split_batches, training_batches
from ravan_flwr.training.captured import CapturedNetwork
from ravan_flwr.training.step import TrainingSettings, autocast, no_scaler


def learning_rate_in_round(config: Config, number: int) -> float:
    """Return the clients' learning rate in a round; `number` counts from 1."""
    schedule = config.parse("learning-rate-schedule")
    start, warm_up = config.learning_rate, schedule["warm-up"]
    if 0 < number <= warm_up:
        return float(start * number / (warm_up + 1))
    if schedule[""] == "constant":
        return start
    end = start / 50 if schedule["end"] == AUTO else float(schedule["end"])
    progress = (number - warm_up) / max(1, config.num_rounds - warm_up)
    return float(end + (start - end) * (1 + math.cos(math.pi * min(1.0, max(0.0, progress)))) / 2)


def make_training_settings(config: Config, number: int, examples: int) -> TrainingSettings:
    """Return the settings of a client with `examples` examples in round `number`."""
    same = {field.name for field in fields(TrainingSettings)} - {"num_steps", "learning_rate"}
    return TrainingSettings(
        config.count_steps(examples),
        learning_rate=learning_rate_in_round(config, number),
        **{name: getattr(config, name) for name in same},
    )


@dataclass(frozen=True)
class ClientWork:
    """A client's work in one round: on which examples, from which values, by which settings."""

    examples: Encoded
    broadcast: Tensors
    fraction: float  # the budget fraction that the server grants
    settings: TrainingSettings
    client_round: ClientRound
    personal: Tensors | None = None  # the client's personal parameters, if it has any
    # The rows of the state's tensors to train, if a secure round's schedule has chosen them.
    scheduled_rows: Tensors | None = None


@dataclass(frozen=True)
class LocalResult:
    """The result of a client's work."""

    upload: Tensors
    personal: Tensors  # the client's personal parameters; empty for most methods
    train_loss: float  # mean over the steps, without the proximal term and the scoring batch
    skipped: int = 0  # steps without effect, because float16 overflowed
    seconds: float = 0.0  # that were spent on it before its message, together with other clients


def train_locally(
    model: AdaptedModel, task: Task, work: ClientWork, loop: "TrainingLoop | None" = None
) -> LocalResult:
    """Run one client's round: load, choose, train, collect; afterwards the model is reset.

    `loop` replaces the plain training loop.
    """
    try:
        return _train(model, task, work, loop)
    except torch.OutOfMemoryError:
        if loop is not None or not model.has_graphs:
            raise
    model.drop_graphs()
    return _train(model, task, work, None)


def _train(
    model: AdaptedModel, task: Task, work: ClientWork, loop: "TrainingLoop | None"
) -> LocalResult:
    loop = loop or TrainingLoop(model, task, work)
    method = model.method.in_round(work.client_round.round)
    with (
        model.holding(work.broadcast, work.personal),
        seed_dropout(loop.dropout_seed, model.device),
    ):
        if work.scheduled_rows is None:
            random = work.client_round.generator("heads")
            method.choose(model.adapters, work.fraction, random, loop.measure)
        else:
            sums_changes(method).train_rows(model.adapters, work.scheduled_rows, work.fraction)
        loop.train(model.parameters())
        upload, personal = model.upload(method), model.collect_personal()
    return LocalResult(upload, personal, loop.mean_loss(), int(loop.skipped))


def calibrate_locally(model: AdaptedModel, task: Task, work: ClientWork) -> LocalResult:
    """Run one client's part of a calibration round."""
    loop = TrainingLoop(model, task, work, captures=False)  # a graph would be kept, and used once
    with model.holding(work.broadcast), seed_dropout(loop.dropout_seed, model.device):
        upload = model.calibration.run(model.adapters, loop)
    return LocalResult(upload, {}, loop.mean_loss())


@contextmanager
def seed_dropout(number: int, device: torch.device) -> Iterator[None]:
    """Seed PyTorch's own generators, which dropout uses, for a `with` block."""
    devices = [device.index or 0] if device.type == "cuda" else []
    # Not torch.manual_seed on a CPU: it records the call stack for a later start of CUDA.
    seed = torch.default_generator.manual_seed if device.type == "cpu" else torch.manual_seed
    with torch.random.fork_rng(devices):
        seed(number % 2**63)
        yield


def check_precision(precision: str, device: torch.device) -> None:
    """Raise ValueError if the device cannot train in that precision."""
    if precision == "float16" and device.type == "cpu":
        raise ValueError(
            "precision = 'float16': got a CPU, expected an accelerator; use bfloat16 or float32"
        )


class TrainingLoop:
    """A client's training loop: forward, backward and Adam over its batches, in one precision."""

    def __init__(
        self, model: AdaptedModel, task: Task, work: ClientWork, *, captures: bool = True
    ) -> None:
        self.model, self.task, self.work, self.captures = model, task, work, captures
        self.settings, self.device = work.settings, model.device
        self.dropout_seed = work.client_round.derive("dropout")
        size = self.settings.micro_batch_size or self.settings.batch_size
        micro_batches, self.num_micro_batches = split_batches(self.draw_batches(), size)
        self.batches = self.read(micro_batches)
        check_precision(self.settings.precision, self.device)
        scales = self.settings.precision == "float16"
        self.scaler = model.scaler if scales else no_scaler(self.device)
        self.skipped = torch.zeros((), dtype=torch.long, device=self.device)
        self.losses: list[Tensor] = []
        model.set_training()

    def draw_batches(self) -> Iterator[np.ndarray]:
        """Yield the rows of each step's batch, without end."""
        return draw_batches(self.task, self.work)

    def read(self, micro_batches: Iterator[np.ndarray]) -> Iterator[Any]:
        """Yield the examples of each micro-batch, in the order of the steps."""
        collate = self.task.collate
        if self.settings.packing:
            collate = task_with(Packs, self.task, "batching=packed").packed
        return read_batches(self.work.examples, collate, micro_batches, self.device)

    def train(self, parameters: Sequence[Tensor]) -> None:
        """Run a round's steps on these parameters, with a new optimiser."""
        self.losses = []  # without that of the batch that scored the heads
        if not parameters:  # a method without adapters, with a frozen classifier
            self.backward()  # for the loss only
            return
        step = self.model.make_step(
            parameters, self.settings, self.scaler, self.backward_all, captures=self.captures
        )
        for _ in range(self.settings.num_steps):
            self.losses.append(step(self._next_micro_batches()))
        self.skipped = step.finish()

    def mean_loss(self) -> float:
        """Return the mean loss over the steps, or over a calibration's batches."""
        return float(torch.stack(self.losses).mean())

    def backward(self) -> None:
        """Compute the gradients of the next batch's mean loss, part by part."""
        self.losses.append(self.backward_all(self._next_micro_batches()))

    def measure(self, sums: Sequence[Tensor]) -> None:
        """Run `backward` while hooks add terms to `sums` that are proportional to the gradients.

        `sums` is divided by the loss scale of float16. If the scale makes gradients overflow, it is
        halved and the batch is computed again.
        """
        if not self.scaler.is_enabled():
            self.backward()
            return
        micro_batches, before = self._next_micro_batches(), [tensor.clone() for tensor in sums]
        while True:
            for tensor in sums:
                tensor.zero_()
            loss, scale = self.backward_all(micro_batches), self.scaler.get_scale()
            if all(bool(tensor.isfinite().all()) for tensor in sums):
                break
            if scale < 1:
                raise ValueError(
                    "precision = 'float16': got gradients that are not finite at any loss scale, "
                    "expected numbers below 65,504; use bfloat16 or float32"
                )
            self.scaler.update(scale / 2)
        for tensor, old in zip(sums, before, strict=True):
            tensor.div_(scale).add_(old)
        self.losses.append(loss)

    def _next_micro_batches(self) -> list[Batch]:
        """Return the micro-batches of the next batch."""
        return [next(self.batches) for _ in range(next(self.num_micro_batches))]

    def backward_all(self, micro_batches: Sequence[Batch]) -> Tensor:
        """Add the gradients of a batch's mean loss, and return the loss."""
        weights = [1.0]  # of the micro-batches in the batch's mean
        if len(micro_batches) > 1:
            sizes = [self.task.size(micro_batch) for micro_batch in micro_batches]
            weights = [size / sum(sizes) for size in sizes]
        losses = []
        for micro_batch, weight in zip(micro_batches, weights, strict=True):
            loss = self.compute_loss(micro_batch)
            loss = loss if weight == 1.0 else loss * weight
            if loss.requires_grad:
                self.scaler.scale(loss).backward()
            losses.append(loss.detach().float())
        return torch.stack(losses).sum()

    def compute_loss(self, micro_batch: Batch) -> Tensor:
        """Return the mean loss of a micro-batch, in the configured precision."""
        with autocast(self.device.type, self.settings.precision):
            return self.task.loss(self.model.network, micro_batch)


def draw_batches(task: Task, work: ClientWork) -> Iterator[np.ndarray]:
    """Yield the rows of each batch of a client's round, without end."""
    examples, settings = work.examples, work.settings
    lengths = task.lengths(examples) if settings.batching == "length" else None
    random = work.client_round.generator("batches")
    return training_batches(len(examples), settings.batch_size, random, lengths)


def sum_metrics(
    model: AdaptedModel, task: Task, examples: Encoded, batch_size: int, precision: str = "float32",
    tally: Tally | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the task's metrics as sums over the examples."""
    order = evaluation_batches(len(examples), batch_size, task.lengths(examples))
    sums: dict[str, float] = {}
    network: Any = model.network.eval()
    if model.evaluation_graphs is not None and isinstance(task, Classification):
        min_size = len(examples) // max(1, len(order))
        network = CapturedNetwork(model.evaluation_graphs, network, min_size, precision)
    with _inference(model.network, precision):
        batches = read_batches(examples, task.collate, iter(order), model.device)
        for rows, batch in zip(order, batches, strict=True):
            answers = examples.read_answers(rows)
            try:
                measured = task.measure(network, batch, answers, tally)
            except torch.OutOfMemoryError:
                if not model.has_graphs:
                    raise
                measured = None
            if measured is None:
                network = model.network
                model.drop_graphs()
                measured = task.measure(network, batch, answers, tally)
            _add(sums, measured)
    return sums


def _add(sums: dict[str, float], measured: Mapping[str, float]) -> None:
    for name, value in measured.items():
        sums[name] = sums.get(name, 0.0) + value


def evaluate_all(
    model: AdaptedModel, task: Task, sets: Mapping[str, Encoded], batch_size: int,
    precision: str = "float32", tally: Tally | None = None,
) -> dict[str, float]:  # fmt: skip
    """Return the metrics over all sets, and `NAME-SET` for each set if there are several."""
    total: dict[str, float] = {}
    by_set: dict[str, float] = {}
    for name, examples in sets.items():
        sums = sum_metrics(model, task, examples, batch_size, precision, tally)
        _add(total, sums)
        means = task.measures.means(sums, len(examples))
        by_set |= {f"{metric}-{name}": mean for metric, mean in means.items()}
    together = task.measures.means(total, sum(map(len, sets.values())))
    return together | by_set if len(sets) > 1 else together


def read_batches(
    examples: Encoded,
    collate: Callable[[Batch], Batch],
    order: Iterator[np.ndarray],
    device: torch.device,
) -> Iterator[Batch]:
    """Yield batches on the device; the next is read while an accelerator computes this one."""

    def read(rows: np.ndarray | None) -> Batch | None:
        if rows is None:
            return None
        batch = collate(examples.take(rows))
        return {k: t.pin_memory() for k, t in batch.items()} if device.type == "cuda" else batch

    if device.type == "cpu" or examples.device == device:
        yield from (collate(examples.take(rows)) for rows in order)
        return
    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(read, next(order, None))
        while (batch := ahead.result()) is not None:
            ahead = reader.submit(read, next(order, None))
            # MPS may read unpinned memory while the next batch is written to it.
            pinned = device.type == "cuda"
            yield {name: tensor.to(device, non_blocking=pinned) for name, tensor in batch.items()}


@contextmanager
def _inference(network: nn.Module, precision: str) -> Iterator[None]:
    """Set a network to inference in that precision, for a `with` block."""
    device = next(network.eval().parameters()).device
    with torch.inference_mode(), autocast(device.type, precision):
        yield


def predict_batch(
    model: AdaptedModel, task: Task, inputs: Columns, precision: str
) -> list[tuple[str | float, ...]]:
    """Return the task's predictions for encoded inputs."""
    tensors = task.collate({name: torch.from_numpy(array) for name, array in inputs.items()})
    tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    with _inference(model.network, precision):
        return task_with(Predicts, task, "predict").predict(model.network, tensors)
