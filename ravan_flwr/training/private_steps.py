"""Do a client's local steps with privacy of each of its examples: DP-SGD (`privacy=example`).

A step differs from another one in its gradient alone (privacy/example_gradients.py): its batch is
a Poisson draw, each example's gradient is clipped, and the sum has noise. A draw that is too large
for the memory is worked on in parts, whose clipped sums are added up.

Draws, noise and dropout come from the system's entropy: what a seed makes, others can make as well.

The server chooses the state and the settings, and it sees whether a client answers. So nothing
here may fail by what is in an example: a model is checked on examples that nobody has, and one
that cannot be worked on counts as zero, as one whose gradient is not finite.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from logging import getLogger
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.privacy.account import StepNoise
from ravan_flwr.privacy.example_gradients import (
    ClippedExamples,
    ExampleGradients,
    check_apart,
    check_trained,
)
from ravan_flwr.privacy.mechanism import subsample
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Batch, Encoded, Task
from ravan_flwr.tasks.extensions import ByExample, task_with
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.local_steps import LocalResult, LocalSteps, Stepper, dropout_from

log = getLogger(__name__)

_NOWHERE = 2**62  # the row of an example that could not be encoded: reading it fails
_AWAY = 1e-2  # from the state at rest, whose zeros would hide gradients


def sampling_rate(batch_size: int, examples: int) -> float:
    """Return how likely an example is in a batch of which so many examples are expected."""
    return min(1.0, batch_size / examples)


def encode_each(task: Task, examples: datasets.Dataset) -> Encoded:
    """Encode a device's examples; what cannot be encoded stays in their number, and counts as zero.

    The server chooses labels and lengths: an error, or a smaller number, would tell of examples.
    """
    problems: list[str] = []
    usable = _usable(task, examples, np.arange(len(examples)), problems)
    if not len(usable):
        raise ValueError(f"none of {len(examples)} examples can be used: {problems[0]}")
    if problems:
        log.warning(
            "%d of %d examples cannot be used, and count as zero: %s; expected examples as the "
            "run's preset describes them",
            *(len(problems), len(examples), problems[0]),
        )
    encoded = task.encode(examples.select(usable))
    missing = np.full(len(examples) - len(encoded), _NOWHERE)
    return replace(encoded, rows=np.concatenate([encoded.rows, missing]))


def _usable(
    task: Task, examples: datasets.Dataset, rows: np.ndarray, problems: list[str]
) -> np.ndarray:
    """Find the rows that can be encoded, half by half; add a problem for each other."""
    try:
        task.encode(examples.select(rows))
    except Exception as error:  # noqa: BLE001 (as in a step)
        if len(rows) == 1:
            problems.append(f"example {rows[0] + 1}: {error}")
            return rows[:0]
    else:
        return rows
    halves = np.array_split(rows, 2)
    return np.concatenate([_usable(task, examples, half, problems) for half in halves])


def train_privately(
    model: AdaptedModel, task: Task, examples: Encoded, broadcast: Tensors, fraction: float,
    steps: LocalSteps, work: ClientRound, noise: StepNoise,
) -> LocalResult:  # fmt: skip
    """Do one client's round, as `train_locally` does, with private steps; no loss is measured."""
    check_examples_apart(model, task)
    stepper = PrivateStepper(model, task, examples, steps, work, noise)
    with model.holding(broadcast), dropout_from(secrets.randbits(63), model.device):
        return stepper.round(fraction, work)


def check_examples_apart(model: AdaptedModel, task: Task) -> None:
    """Refuse a model whose examples are not apart; ValueError. Once a process is enough.

    Neither real examples nor a state that the server sends are looked at.
    """
    if model.has_examples_apart:
        return
    by_example = task_with(ByExample, task, "privacy=example")
    network, random = model.network, torch.Generator().manual_seed(0)
    config: Any = network.config
    with model.holding(model.initial_state()):
        parameters = model.parameters()
        if not parameters:
            return
        check_trained(network, parameters)
        with torch.no_grad():
            for parameter in parameters:
                moved = torch.randn(parameter.shape, generator=random) * _AWAY
                parameter.add_(moved.to(parameter))
        network.eval()  # dropout would differ
        gradients = ExampleGradients(network, parameters)
        together, alone = (
            _of_batch(
                gradients,
                by_example,
                partial(task.loss, network),
                by_example.made_up(config, number),
            )
            for number in (2, 1)
        )
        check_apart(alone, together)
    model.has_examples_apart = True


class PrivateStepper(Stepper):
    """Make private gradients for the optimiser; no plain one is ever computed."""

    def __init__(
        self, model: AdaptedModel, task: Task, examples: Encoded, steps: LocalSteps,
        work: ClientRound, noise: StepNoise,
    ) -> None:  # fmt: skip
        self.noise, self.by_example = noise, task_with(ByExample, task, "privacy=example")
        self._failed: set[int] = set()  # rows of which the log has said so
        self.rate = sampling_rate(steps.batch_size, len(examples))
        super().__init__(model, task, examples, steps, work)

    def order_of(
        self,
        number: int,
        lengths: np.ndarray | None,  # noqa: ARG002 (who meets whom is chance alone)
        work: ClientRound,  # noqa: ARG002
    ) -> Iterator[np.ndarray]:
        """Draw each row by itself, from the system's entropy, for batch after batch.

        Batches have different sizes, and may be empty. Who knew a seed would know who is in them.
        """
        while True:
            yield subsample(number, self.rate)

    def read(
        self, parts: Iterator[np.ndarray], lay_out: Callable[[Batch], Batch]
    ) -> Iterator[np.ndarray]:
        """Read nothing ahead: an example that cannot be read ends no step."""
        del lay_out
        return parts

    def train(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        self.gradients = ExampleGradients(self.model.network, self.model.parameters())
        self.clipped = ClippedExamples(parameters, self.noise)
        super().train(parameters)

    def mean_loss(self) -> float:
        """Measure none: it would tell of the examples."""
        return math.nan

    def backward(self) -> None:
        """Put a private gradient into the parameters."""
        for _ in range(next(self.parts)):
            self._add(next(self.batches))
        released = self.clipped.release(self.rate * len(self.examples))
        for parameter, gradient in zip(self.gradients.parameters, released, strict=True):
            parameter.grad = gradient.to(parameter)

    def _add(self, rows: np.ndarray) -> None:
        """Add the clipped gradients of these examples; one that fails adds nothing.

        Those that it came with are worked on again, one by one: what they add must not depend on
        it.
        """
        try:
            batch = self.task.collate(self.examples.take(rows))
            self.clipped.add(_of_batch(self.gradients, self.by_example, self.loss_of, batch))
        except Exception as error:  # noqa: BLE001 (whatever it is, the server must not learn of it)
            problem = f"{type(error).__name__}: {error}"
        else:
            return
        if len(rows) > 1:
            for row in rows:
                self._add(np.array([row]))
        elif rows[0] not in self._failed:
            self._failed.add(rows[0])
            log.warning("example %d counts as zero: %s", rows[0] + 1, problem)


def _of_batch(
    gradients: ExampleGradients, task: ByExample, loss: Callable[[Batch], Tensor], batch: Batch
) -> list[Tensor]:
    """Compute the gradients of each example of a batch."""
    device = next(gradients.network.parameters()).device
    moved = {name: tensor.to(device) for name, tensor in batch.items()}
    return gradients.of(lambda: loss(moved), task.sizes(moved).to(device))
