"""A client's local work: some steps of Adam on its own examples, or an evaluation."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ravan_flwr.methods.base import Tensors
from ravan_flwr.model import AdaptedModel
from ravan_flwr.seeding import generator
from ravan_flwr.tasks.base import Batch, Task

PRECISIONS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class LocalSteps:
    """How a client trains in a round."""

    number: int
    batch_size: int
    learning_rate: float
    precision: str
    proximal_mu: float = 0.0  # FedProx: mu / 2 |w - w at the start of the round|^2 on top


@dataclass(frozen=True)
class LocalResult:
    """What came of it."""

    upload: Tensors
    train_loss: float  # mean over the steps, without the proximal term


def train_locally(
    model: AdaptedModel,
    task: Task,
    examples: Batch,
    broadcast: Tensors,
    share: float,
    steps: LocalSteps,
    purpose: tuple[int, int, int],
) -> LocalResult:
    """One client's round. `purpose` is (seed, round, partition id): all its randomness."""
    train = _Stepper(model, task, examples, steps, purpose)
    with model.holding(broadcast):
        seed, *who = purpose
        random = generator(seed, "heads", *who)
        model.method.choose(model.adapters, share, random, train.backward)
        train.train(model.parameters())
        return LocalResult(model.upload(), train.mean_loss())


def calibrate_locally(
    model: AdaptedModel,
    task: Task,
    examples: Batch,
    broadcast: Tensors,
    steps: LocalSteps,
    purpose: tuple[int, int, int],
) -> LocalResult:
    """One client's part of a calibration round."""
    work = _Stepper(model, task, examples, steps, purpose)
    with model.holding(broadcast):
        upload = model.method.calibrate(model.adapters, work)
    return LocalResult(upload, work.mean_loss())


class _Stepper:
    """Forward, backward and Adam over a client's batches, in the precision asked for."""

    def __init__(
        self,
        model: AdaptedModel,
        task: Task,
        examples: Batch,
        steps: LocalSteps,
        purpose: tuple[int, int, int],
    ) -> None:
        self.model, self.task, self.steps = model, task, steps
        seed, *who = purpose
        self.batches = _endless(examples, steps.batch_size, generator(seed, "batches", *who))
        self.device = model.device
        self.dtype = PRECISIONS[steps.precision]
        if self.dtype is torch.float16 and self.device.type == "cpu":
            raise ValueError(
                "precision = 'float16': got a CPU, expected an accelerator; use bfloat16 or float32"
            )
        self.scaler = torch.amp.GradScaler(
            self.device.type, enabled=self.dtype is torch.float16
        )  # fmt: skip
        self.losses: list[Tensor] = []
        model.network.train()

    def train(self, parameters: Sequence[Tensor]) -> None:
        """A round's steps on these parameters; the optimiser's state starts anew."""
        optimizer = torch.optim.Adam(
            parameters, lr=self.steps.learning_rate, fused=self.device.type != "mps"
        )
        anchors = [p.detach().clone() for p in parameters] if self.steps.proximal_mu else []
        for _ in range(self.steps.number):
            optimizer.zero_grad(set_to_none=True)
            self.backward()
            if anchors:
                self.scaler.unscale_(optimizer)
                _pull_back(parameters, anchors, self.steps.proximal_mu)
            self.scaler.step(optimizer)
            self.scaler.update()

    def mean_loss(self) -> float:
        """Of all batches so far."""
        return float(torch.stack(self.losses).mean())

    def backward(self) -> None:
        """Gradients of the next batch."""
        batch = next(self.batches)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype is not None):
            loss = self.task.loss(self.model.network, _to(batch, self.device))
        self.scaler.scale(loss).backward()
        self.losses.append(loss.detach().float())


def _pull_back(parameters: Sequence[Tensor], anchors: list[Tensor], mu: float) -> None:
    """Add the gradient of the proximal term, mu (w - anchor)."""
    with torch.no_grad():
        for parameter, anchor in zip(parameters, anchors, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - anchor, alpha=mu)


def evaluate(network: nn.Module, task: Task, examples: Batch, batch_size: int) -> dict[str, float]:
    """`loss` and the task's metrics, as means over the examples."""
    device = next(network.parameters()).device
    network.eval()
    sums: dict[str, float] = {}
    number = _length(examples)
    with torch.inference_mode():
        for start in range(0, number, batch_size):
            batch = {k: v[start : start + batch_size] for k, v in examples.items()}
            for name, value in task.measure(network, _to(batch, device)).items():
                sums[name] = sums.get(name, 0.0) + value
    return {name: value / number for name, value in sums.items()}


def _endless(examples: Batch, batch_size: int, random: torch.Generator) -> Iterator[Batch]:
    """Batches of one shuffled pass after the other; the last of a pass may be short."""
    while True:
        order = torch.randperm(_length(examples), generator=random)
        for rows in order.split(batch_size):
            yield {name: tensor[rows] for name, tensor in examples.items()}


def _length(examples: Batch) -> int:
    return len(next(iter(examples.values())))


def _to(batch: Batch, device: torch.device) -> Batch:
    return {name: tensor.to(device, non_blocking=True) for name, tensor in batch.items()}
