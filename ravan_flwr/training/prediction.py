"""Ask a model for predictions, in the precision of its run."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ravan_flwr.tasks.base import Columns, Task
from ravan_flwr.tasks.multiple_choice import Questions
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.local_steps import PRECISIONS


@contextmanager
def _asking(model: AdaptedModel, precision: str) -> Iterator[None]:
    """Make a network ready to be asked."""
    model.network.eval()
    dtype = PRECISIONS[precision]
    with (
        torch.inference_mode(),
        torch.autocast(model.device.type, dtype, enabled=dtype is not None),
    ):
        yield


def predictions(
    model: AdaptedModel, task: Task, inputs: Columns, precision: str
) -> list[tuple[str | float, ...]]:
    """Predict what the task says of some encoded inputs."""
    tensors = task.collate({name: torch.from_numpy(array) for name, array in inputs.items()})
    tensors = {name: tensor.to(model.device) for name, tensor in tensors.items()}
    with _asking(model, precision):
        return task.predict(model.network, tensors)


def accuracy(model: AdaptedModel, questions: Questions, precision: str) -> float:
    """Compute the share of multiple-choice questions that are answered right."""
    with _asking(model, precision):
        return questions.accuracy(model.network, model.device)
