"""Do a client's local steps with privacy of each of its examples: DP-SGD (`privacy=example`).

A step differs from another one in its gradient alone (privacy/example_mechanism.py): its batch is
a Poisson draw, each example's gradient is clipped, and the sum has noise. A draw that is too large
for the memory is worked on in parts, whose clipped sums are added up.

Draws, noise and dropout come from the system's entropy: what a seed makes, others can make as well.
"""

import math
import secrets
from collections.abc import Iterator, Sequence

import numpy as np
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.privacy.example_gradients import ExampleGradients, check_apart, check_trained
from ravan_flwr.privacy.example_mechanism import ClippedExamples, StepNoise
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks.base import Batch, Encoded, Task
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.batching import poisson_batches
from ravan_flwr.training.local_steps import LocalResult, LocalSteps, Stepper, dropout_from

_LOOKED_AT = 8  # examples, of which one at least has a gradient


def sampling_rate(batch_size: int, examples: int) -> float:
    """Return how likely an example is in a batch of which so many examples are expected."""
    return min(1.0, batch_size / examples)


def train_privately(
    model: AdaptedModel,
    task: Task,
    examples: Encoded,
    broadcast: Tensors,
    share: float,
    steps: LocalSteps,
    work: ClientRound,
    noise: StepNoise,
) -> LocalResult:
    """Do one client's round, as `train_locally` does, with private steps; no loss is measured."""
    stepper = PrivateStepper(model, task, examples, steps, work, noise)
    with model.holding(broadcast), dropout_from(secrets.randbits(63), model.device):
        return stepper.round(share, work)


class PrivateStepper(Stepper):
    """Make private gradients for the optimiser; no plain one is ever computed."""

    def __init__(
        self,
        model: AdaptedModel,
        task: Task,
        examples: Encoded,
        steps: LocalSteps,
        work: ClientRound,
        noise: StepNoise,
    ) -> None:
        self.examples, self.noise = examples, noise
        self.rate = sampling_rate(steps.batch_size, len(examples))
        super().__init__(model, task, examples, steps, work)

    def order_of(
        self,
        number: int,
        lengths: np.ndarray | None,  # noqa: ARG002 (who meets whom is chance alone)
        work: ClientRound,  # noqa: ARG002
    ) -> Iterator[np.ndarray]:
        return poisson_batches(number, self.rate)

    def train(self, parameters: Sequence[Tensor]) -> None:
        if not parameters:
            return
        self.gradients = ExampleGradients(self.model.network, self.model.parameters())
        self.clipped = ClippedExamples(parameters, self.noise)
        self._check()
        super().train(parameters)

    def mean_loss(self) -> float:
        """Measure none: it would tell of the examples."""
        return math.nan

    def backward(self) -> None:
        """Put a private gradient into the parameters."""
        for _ in range(next(self.parts)):
            self.clipped.add(self._of(next(self.batches)))
        released = self.clipped.release(self.rate * len(self.examples))
        for parameter, gradient in zip(self.gradients.parameters, released, strict=True):
            parameter.grad = gradient.to(parameter)

    def _of(self, batch: Batch) -> list[Tensor]:
        sizes = self.task.sizes(batch).to(self.device)
        return self.gradients.of(lambda: self.loss_of(batch), sizes)

    def _check(self) -> None:
        """Refuse a model whose examples are not apart, before it is trained; once is enough."""
        if self.model.has_examples_apart:
            return
        check_trained(self.model.network, self.gradients.parameters)
        self.model.network.eval()  # dropout would differ
        try:
            self.model.has_examples_apart = any(map(self._is_apart, range(_LOOKED_AT)))
        finally:
            self.model.network.train()
        if not self.model.has_examples_apart:
            raise ValueError(
                "privacy = 'example': got gradients that are not numbers, so that nobody can see "
                "whether examples depend on each other, expected finite ones; lower learning-rate"
            )

    def _is_apart(self, first: int) -> bool:
        """Compare an example by itself with the same in company; False if it has no gradient."""
        number = len(self.examples)
        if first >= number:
            return False
        rows = np.array([first, (first + 1) % number][:number])
        together, alone = (self._of_rows(chosen) for chosen in (rows, rows[:1]))
        return check_apart(alone, together)

    def _of_rows(self, rows: np.ndarray) -> list[Tensor]:
        batch = self.task.collate(self.examples.take(rows))
        moved = {name: tensor.to(self.device) for name, tensor in batch.items()}
        dtype, self.dtype = self.dtype, None  # whose rounding would differ, too
        try:
            return self._of(moved)
        finally:
            self.dtype = dtype
