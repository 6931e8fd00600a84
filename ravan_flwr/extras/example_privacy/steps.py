"""Run a client's local steps with differential privacy of each example: DP-SGD (`privacy=example`).

A step differs from a plain one in its gradient only (gradients.py). Its batch is a
Poisson sample, each example's gradient is clipped, and the sum has noise. A sample that is too
large for the memory is computed in parts, whose clipped sums are added.

Samples, noise and dropout use the system's entropy, because others could repeat draws from a seed.

The server chooses the state and the settings, and it sees whether a client answers. So the content
of an example must not cause an error. A model is checked on made-up examples. An example that
cannot be processed counts as zero, and so does one whose gradient is not finite.
"""

import math
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from logging import getLogger
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from ravan_flwr.extras.example_privacy.gradients import (
    ClippedExamples,
    ExampleGradients,
    StepNoise,
    check_independent,
    check_trained,
)
from ravan_flwr.privacy.mechanism import subsample
from ravan_flwr.tasks.base import Batch, Encoded, Task
from ravan_flwr.tasks.extensions import ByExample, task_with
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.local_steps import ClientWork, LocalResult, TrainingLoop, train_locally

log = getLogger(__name__)

_UNREADABLE = 2**62  # the row of an example that could not be encoded: reading it fails
_PERTURBATION = 1e-2  # of the idle state, whose zeros would hide gradients


def sampling_rate(batch_size: int, examples: int) -> float:
    """Return the probability of an example in a batch whose expected size is `batch_size`."""
    return min(1.0, batch_size / examples)


def encode_each(task: Task, examples: datasets.Dataset) -> Encoded:
    """Encode a device's examples; an example that cannot be encoded counts, with zero gradients.

    The server chooses labels and lengths. So an error, or a smaller number of examples, would
    reveal information on examples.
    """
    problems: list[str] = []
    encodable = _encodable_rows(task, examples, np.arange(len(examples)), problems)
    if not len(encodable):
        raise ValueError(f"none of {len(examples)} examples can be used: {problems[0]}")
    if problems:
        log.warning(
            "%d of %d examples cannot be used, and count as zero: %s; expected examples as the "
            "run's preset describes them",
            *(len(problems), len(examples), problems[0]),
        )
    encoded = task.encode(examples.select(encodable))
    missing = np.full(len(examples) - len(encoded), _UNREADABLE)
    return replace(encoded, rows=np.concatenate([encoded.rows, missing]))


def _encodable_rows(
    task: Task, examples: datasets.Dataset, rows: np.ndarray, problems: list[str]
) -> np.ndarray:
    """Return the rows that can be encoded, by bisection; append a problem for each other row."""
    try:
        task.encode(examples.select(rows))
    except Exception as error:  # noqa: BLE001 (as in a step)
        if len(rows) == 1:
            problems.append(f"example {rows[0] + 1}: {error}")
            return rows[:0]
    else:
        return rows
    halves = np.array_split(rows, 2)
    return np.concatenate([_encodable_rows(task, examples, half, problems) for half in halves])


def train_privately(
    model: AdaptedModel, task: Task, work: ClientWork, noise: StepNoise
) -> LocalResult:
    """Run one client's round with private steps, and no measured loss."""
    check_examples_independent(model, task)
    return train_locally(model, task, work, PrivateTrainingLoop(model, task, work, noise))


def check_examples_independent(model: AdaptedModel, task: Task) -> None:
    """Raise ValueError for a model that mixes the examples of a batch; once per process.

    The check uses neither real examples nor a state that the server sent.
    """
    if model.examples_are_independent:
        return
    by_example = task_with(ByExample, task, "privacy=example")
    network, random = model.network, torch.Generator().manual_seed(0)
    config: Any = network.config
    with model.holding(model.idle_state):
        parameters = model.parameters()
        if not parameters:
            return
        check_trained(network, parameters)
        with torch.no_grad():
            for parameter in parameters:
                shift = torch.randn(parameter.shape, generator=random) * _PERTURBATION
                parameter.add_(shift.to(parameter))
        network.eval()  # dropout would differ
        gradients = ExampleGradients(network, parameters)
        together, alone = (
            _example_gradients(
                gradients,
                by_example,
                partial(task.loss, network),
                by_example.made_up(config, number),
            )
            for number in (2, 1)
        )
        check_independent(alone, together)
    model.examples_are_independent = True


class PrivateTrainingLoop(TrainingLoop):
    """A training loop with private gradients; no plain gradient is ever computed."""

    def __init__(self, model: AdaptedModel, task: Task, work: ClientWork, noise: StepNoise) -> None:
        self.noise, self.by_example = noise, task_with(ByExample, task, "privacy=example")
        self._failed: set[int] = set()  # rows that the log has reported
        self.rate = sampling_rate(work.settings.batch_size, len(work.examples))
        super().__init__(model, task, work)
        self.dropout_seed = secrets.randbits(63)

    def draw_batches(self) -> Iterator[np.ndarray]:
        """Return Poisson samples of the rows, from the system's entropy, without end.

        Batches have different sizes, and may be empty. A known seed would reveal their examples.
        """
        # Without `self`: a cycle would keep this loop, and the network, in memory after the round.
        number, rate = len(self.work.examples), self.rate
        return (subsample(number, rate) for _ in count())

    def read(self, micro_batches: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Return the rows unread: an example that cannot be read must not end a step."""
        return micro_batches

    def train(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        self.gradients = ExampleGradients(self.model.network, self.model.parameters())
        self.clipped = ClippedExamples(parameters, self.noise)
        super().train(parameters)

    def mean_loss(self) -> float:
        """Return NaN: a loss would reveal information on the examples."""
        return math.nan

    def backward_all(self, micro_batches: Sequence[Any]) -> Tensor:
        """Write a private gradient into the parameters; the loss is not measured."""
        for rows in micro_batches:
            self._add_clipped(rows)
        released = self.clipped.noised_mean(self.rate * len(self.work.examples))
        for parameter, gradient in zip(self.gradients.parameters, released, strict=True):
            parameter.grad = gradient.to(parameter)
        return torch.tensor(math.nan)

    def _add_clipped(self, rows: np.ndarray) -> None:
        """Add the clipped gradients of these examples; an example that fails adds nothing.

        After a failure all examples of the part are computed again one by one, so that their
        gradients do not depend on the failed one.
        """
        try:
            batch = self.task.collate(self.work.examples.take(rows))
            self.clipped.add(
                _example_gradients(self.gradients, self.by_example, self.compute_loss, batch)
            )
        except Exception as error:  # noqa: BLE001 (the server must not learn of any error)
            problem = f"{type(error).__name__}: {error}"
        else:
            return
        if len(rows) > 1:
            for row in rows:
                self._add_clipped(np.array([row]))
        elif rows[0] not in self._failed and self.work.examples.rows[rows[0]] != _UNREADABLE:
            self._failed.add(rows[0])  # others were reported when they were encoded
            log.warning("example %d counts as zero: %s", rows[0] + 1, problem)


def _example_gradients(
    gradients: ExampleGradients, task: ByExample, loss: Callable[[Batch], Tensor], batch: Batch
) -> list[Tensor]:
    """Return the gradients of each example of a batch."""
    device = next(gradients.network.parameters()).device
    on_device = {name: tensor.to(device) for name, tensor in batch.items()}
    return gradients.of(lambda: loss(on_device), task.sizes(on_device).to(device))
