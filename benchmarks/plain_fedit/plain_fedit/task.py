"""Load model and data in every message; the partitioner is cached, as in the examples."""

from collections.abc import Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import load_dataset
from flwr_datasets import FederatedDataset
from flwr_datasets.partitioner import DirichletPartitioner, IidPartitioner, Partitioner
from peft import LoraConfig, PeftModel, get_peft_model
from torch.utils.data import DataLoader
from transformers import AutoModelForImageClassification

_federated: FederatedDataset | None = None


def load_model(settings: Any) -> PeftModel:
    """Load a vision transformer with a LoRA, and a classifier that is the same everywhere."""
    torch.manual_seed(0)
    base = AutoModelForImageClassification.from_pretrained(
        settings["model"], num_labels=10, ignore_mismatched_sizes=True
    )
    rank = settings["lora-rank"]
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=["q_proj", "v_proj"])
    adapted = get_peft_model(base, config)
    assert isinstance(adapted, PeftModel)
    return adapted


def load_train(settings: Any, partition_id: int, num_partitions: int) -> DataLoader[Any]:
    """Load a client's partition of the training set."""
    global _federated  # noqa: PLW0603 (as Flower's examples do)
    if _federated is None:
        partitioner: Partitioner = IidPartitioner(num_partitions)
        if settings["partition"] == "dirichlet":
            partitioner = DirichletPartitioner(
                num_partitions, partition_by="label", alpha=0.3, min_partition_size=10, seed=0
            )
        _federated = FederatedDataset(dataset=settings["data"], partitioners={"train": partitioner})
    part = _federated.load_partition(partition_id, "train").with_transform(_to_tensors)
    return DataLoader(part, batch_size=settings["batch-size"], shuffle=True)


def load_test(settings: Any) -> DataLoader[Any]:
    """Load the server's test set."""
    path = str(Path(settings["data"]) / "test.parquet")
    test = load_dataset("parquet", data_files=path, split="train").with_transform(_to_tensors)
    return DataLoader(test, batch_size=256)


def _to_tensors(batch: dict[str, Any]) -> dict[str, Any]:
    if isinstance(batch["image"][0], list):  # of numbers in [0, 1]
        pixels = torch.tensor(batch["image"], dtype=torch.float32)[:, None]
    else:
        images = np.stack([np.asarray(image, dtype=np.float32) for image in batch["image"]])
        pixels = torch.from_numpy(images).permute(0, 3, 1, 2) / 255
    return {"pixel_values": pixels * 2 - 1, "labels": torch.tensor(batch["label"])}


def train(model: PeftModel, loader: DataLoader[Any], steps: int, learning_rate: float) -> float:
    """Take local steps; return their mean loss."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(trained, lr=learning_rate)
    model.train()
    total = 0.0
    batches: Iterator[Any] = cycle(loader)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(**next(batches)).loss
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total / steps


def accuracy(model: PeftModel, loader: DataLoader[Any]) -> float:
    """Measure the fraction of correct answers."""
    model.eval()
    right = number = 0
    with torch.no_grad():
        for batch in loader:
            found = model(pixel_values=batch["pixel_values"]).logits.argmax(-1)
            right += int((found == batch["labels"]).sum())
            number += len(found)
    return right / number
