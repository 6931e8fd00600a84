"""Image classification: cross-entropy and accuracy."""

from typing import Any, cast

import datasets
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.tasks.base import Batch, Task


class Vision(Task):
    """Images in the column `image`, floats in [0, 1], (height, width) or (channels, ...)."""

    metric = "accuracy"

    def encode(self, examples: datasets.Dataset, label_column: str) -> Batch:
        columns = examples.with_format("numpy", columns=["image", label_column])[:]
        pixels = torch.from_numpy(columns["image"]).float()
        if pixels.ndim == 3:
            pixels = pixels[:, None]
        return {
            "pixel_values": pixels * 2 - 1,
            "labels": torch.from_numpy(columns[label_column]).long(),
        }

    def shapes(
        self, config: Any, batch_size: int
    ) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
        side = config.image_size
        sides = tuple(side) if isinstance(side, list | tuple) else (side, side)
        return {
            "pixel_values": ((batch_size, config.num_channels, *sides), torch.float32),
            "labels": ((batch_size,), torch.int64),
        }

    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        return F.cross_entropy(_logits(network, batch), batch["labels"])

    def measure(self, network: nn.Module, batch: Batch) -> dict[str, float]:
        logits = _logits(network, batch)
        right = (logits.argmax(-1) == batch["labels"]).sum()
        loss = F.cross_entropy(logits.float(), batch["labels"], reduction="sum")
        return {"loss": float(loss), "accuracy": float(right)}


TASK = Vision()


def _logits(network: nn.Module, batch: Batch) -> Tensor:
    return cast(Tensor, network(pixel_values=batch["pixel_values"]).logits)
