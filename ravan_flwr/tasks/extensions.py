"""Define what a task may do beside what every task does (base.py), and what asks for it.

Predicts     the command `predict`
Packs        `batching=packed`: short texts side by side; its row says packs=True
ByExample    `privacy=example`, and a plan of it

`Classification` is what every task with a classifier on top shares.
"""

from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.data.rows import text_of
from ravan_flwr.tasks.base import Batch, Columns, Task
from ravan_flwr.tasks.tally import Tally

Wanted = TypeVar("Wanted", bound=Task)


class Predicts(Task):
    """Predict for examples without labels."""

    # What is predicted of an example, by name: texts, but for a `probability`.
    prediction_columns: ClassVar[tuple[str, ...]]
    right: ClassVar[str] = "label"  # the role of the column that has the right answers

    @property
    def input_roles(self) -> list[str]:
        """List the roles of the columns from which is predicted."""
        return [role for role, _ in self.data.columns if role != self.right]

    def checked(self, role: str, value: Any) -> Any:
        """Check one value of an example, no image; else raise UnreadableError."""
        return text_of(role, value)

    @abstractmethod
    def inputs(self, columns: Mapping[str, Any]) -> Columns:
        """Encode a batch of examples without their labels; columns are named by role."""

    @abstractmethod
    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        """Predict the `prediction_columns` of each of some encoded inputs."""


class Packs(Task):
    """Lay short texts side by side in a batch."""

    @abstractmethod
    def packed(self, batch: Batch) -> Batch:
        """Do what `collate` does, with texts side by side where two fit into a row."""


class ByExample(Task):
    """Have a loss of each example, and examples that nobody has to try it with."""

    def sizes(self, batch: Batch) -> Tensor:
        """Count how many of the things over which `loss` is the mean belong to each example."""
        return torch.ones(len(next(iter(batch.values()))))

    def made_up(self, config: Any, number: int) -> Batch:
        """Make a batch of random examples, the same on every machine."""
        examples = []
        for seed in range(number):
            random, example = torch.Generator().manual_seed(seed), {}
            for name, (shape, dtype) in self.shapes(config, 1).items():
                if dtype.is_floating_point:
                    example[name] = torch.randn(shape, generator=random, dtype=dtype)
                elif dtype is torch.bool:  # networks make such a mask of one by token
                    example[name] = torch.ones(1, shape[-1], dtype=torch.int64)
                else:
                    most = getattr(config, "vocab_size", 2) if name == "input_ids" else 2
                    example[name] = torch.randint(most, shape, generator=random, dtype=dtype)
            examples.append(example)
        return {name: torch.cat([example[name] for example in examples]) for name in examples[0]}


def task_with(kind: Callable[..., Wanted], task: Task, setting: str) -> Wanted:
    """Return the task as one of that kind; ValueError if it is none, with what was asked for."""
    cls = cast(type[Wanted], kind)
    if not isinstance(task, cls):
        raise ValueError(
            f"{setting}: got task {type(task).__name__}, which is no {cls.__name__}, expected one "
            "that is (tasks/extensions.py); choose another task, or leave it out"
        )
    return task


class Classification(Predicts, ByExample):
    """Predict one label of several, in the batch's `labels`."""

    metric = "accuracy"
    prediction_columns = ("label", "probability")

    @abstractmethod
    def logits(self, network: nn.Module, batch: Batch) -> Tensor:
        """Compute the logits, (examples, labels)."""

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
    """Sum loss and right answers over a batch."""
    right = (logits.argmax(-1) == labels).sum()
    loss = F.cross_entropy(logits.float(), labels, reduction="sum")
    return {"loss": float(loss), "accuracy": float(right)}
