"""What a task must say: how examples become tensors, what the loss and the metrics are."""

from abc import ABC, abstractmethod
from typing import Any

import datasets
import torch
from torch import Tensor, nn

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Batch = dict[str, Tensor]  # every tensor's first dimension runs over the examples


class Task(ABC):
    """One kind of learning problem; it keeps no state."""

    metric: str  # the name of the metric by which runs are compared; higher is better

    @abstractmethod
    def encode(self, examples: datasets.Dataset, label_column: str) -> Batch:
        """All examples as tensors, once, before training."""

    @abstractmethod
    def shapes(
        self, config: Any, batch_size: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        """Shape and dtype of every tensor of a batch for a model of that configuration."""

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """The mean loss over the batch."""

    @abstractmethod
    def measure(self, network: nn.Module, batch: Batch) -> dict[str, float]:
        """`loss` and the metrics, as sums over the batch."""
