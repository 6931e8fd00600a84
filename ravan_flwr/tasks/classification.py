"""Share what every task with a classifier on top does: cross-entropy and accuracy of logits."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.tasks.base import Batch
from ravan_flwr.tasks.extensions import ByExample, Predicts
from ravan_flwr.tasks.tally import Tally


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
