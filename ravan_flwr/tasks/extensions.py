"""Define optional abilities of a task, beyond what every task has (base.py), and their users.

Predicts     the command `predict`
Packs        `batching=packed`: short texts side by side; its `TaskInfo` has packs=True
ByExample    `privacy=example`, and its plan

`Classification` is the base class of tasks with a classifier.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.data.rows import check_text
from ravan_flwr.tasks.base import Batch, Columns, Task
from ravan_flwr.tasks.tally import Tally

Ability = TypeVar("Ability", bound=Task)


class Predicts(Task):
    """Predict for examples without labels."""

    # The names of the predicted values of an example: texts, except `probability`.
    prediction_columns: ClassVar[tuple[str, ...]]
    right: ClassVar[str] = "label"  # the role of the column with the correct answers

    @property
    def input_roles(self) -> list[str]:
        """Return the roles of the input columns of a prediction."""
        return [role for role, _ in self.data.columns if role != self.right]

    def checked(self, role: str, value: Any) -> Any:
        """Return a value of an example if it is valid; otherwise raise UnreadableError.

        Images are checked elsewhere.
        """
        return check_text(role, value)

    @abstractmethod
    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        """Encode a batch of examples without their labels; columns are named by role."""

    @abstractmethod
    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        """Return the `prediction_columns` of each encoded input in a batch."""


class Packs(Task):
    """Pack short texts side by side into the rows of a batch."""

    @abstractmethod
    def packed(self, batch: Batch) -> Batch:
        """Return the batch as `collate` does, with several texts in a row where they fit."""


class ByExample(Task):
    """Support gradients by example: sizes of examples, and random examples to test with."""

    def sizes(self, batch: Batch) -> Tensor:
        """Return how many of the units that `loss` averages over belong to each example."""
        return torch.ones(len(next(iter(batch.values()))))

    def made_up(self, config: Any, number: int) -> Batch:
        """Return a batch of `number` random examples, the same on every machine."""
        examples = []
        for seed in range(number):
            random, example = torch.Generator().manual_seed(seed), {}
            for name, (shape, dtype) in self.shapes(config, 1).items():
                if dtype.is_floating_point:
                    example[name] = torch.randn(shape, generator=random, dtype=dtype)
                elif dtype is torch.bool:  # networks derive such a mask from one by token
                    example[name] = torch.ones(1, shape[-1], dtype=torch.int64)
                else:
                    end = getattr(config, "vocab_size", 2) if name == "input_ids" else 2
                    example[name] = torch.randint(end, shape, generator=random, dtype=dtype)
            examples.append(example)
        return {name: torch.cat([example[name] for example in examples]) for name in examples[0]}


def task_with(ability: Callable[..., Ability], task: Task, setting: str) -> Ability:
    """Return the task as an instance of `ability`; ValueError with the setting if it is none."""
    cls = cast(type[Ability], ability)
    if not isinstance(task, cls):
        raise ValueError(
            f"{setting}: got task {type(task).__name__}, which is no {cls.__name__}, expected one "
            "that is (tasks/extensions.py); choose another task, or leave it out"
        )
    return task


class Classification(Predicts, ByExample):
    """Predict one of several classes; `labels` in a batch has the correct ones."""

    metric = "accuracy"
    prediction_columns = ("label", "probability")

    @abstractmethod
    def logits(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return the logits, (examples, labels)."""

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(self.logits(network, batch), batch["labels"])

    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        logits, labels = self.logits(network, batch), batch["labels"]
        if tally is not None:
            tally.add(labels.tolist(), logits.argmax(-1).tolist())
        return right_and_loss(logits, labels)

    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        best = self.logits(network, batch).float().softmax(-1).max(-1)
        numbers, names = best.indices.tolist(), self.data.labels
        return [(names[n], p) for n, p in zip(numbers, best.values.tolist(), strict=True)]


def right_and_loss(logits: Tensor, labels: Tensor) -> dict[str, float]:
    """Return the sums of loss and correct predictions over a batch."""
    right = (logits.argmax(-1) == labels).sum()
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return {"loss": float(loss), "accuracy": float(right)}
