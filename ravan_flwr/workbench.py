"""What a process builds once and then lends to every client: model, task, examples.

This is the project's one cache. In a simulation many clients share a process, and the
server shares it with them when everything runs in one; each finds the model as it was,
since `AdaptedModel.holding` puts everything back.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch

from ravan_flwr.adapters import Layer
from ravan_flwr.config import Config
from ravan_flwr.dataset import Partition, deal_out, load_splits, num_labels
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.model import AdaptedModel, build_network, pick_device
from ravan_flwr.seeding import derive
from ravan_flwr.tasks import get_task
from ravan_flwr.tasks.base import Batch


def check_method(config: Config) -> type[Method]:
    """The configuration's method; ValueError if the server optimiser does not go with it."""
    method = get_method(config.method)
    if config.server_optimizer != "none" and not method.averages:
        averaging = [name for name in METHODS if get_method(name).averages]
        raise ValueError(
            f"server-optimizer = {config.server_optimizer!r}: method {config.method!r} makes its "
            f"next state otherwise than by a mean; expected one of {', '.join(averaging)}, or "
            "server-optimizer=none"
        )
    return method


def make_method(config: Config, layers: Sequence[Layer], size: int) -> Method:
    """The configuration's method, over these layers of a network of that size."""
    method = check_method(config)
    told = {field.name: getattr(config, field.name) for field in dataclasses.fields(Settings)}
    return method(Settings(**told), layers, size)


@dataclass(frozen=True)
class Examples:
    """What one client has: rows of everybody's, taken when they are needed."""

    everybody: Batch
    train_rows: np.ndarray
    validation_rows: np.ndarray  # held back from training; empty unless asked for

    @property
    def train(self) -> Batch:
        return {name: tensor[self.train_rows] for name, tensor in self.everybody.items()}

    @property
    def validation(self) -> Batch:
        return {name: tensor[self.validation_rows] for name, tensor in self.everybody.items()}


@lru_cache(maxsize=1)
def get_workbench(config: Config) -> "Workbench":
    """The workbench of this configuration; the one before it is let go."""
    return Workbench(config)


class Workbench:
    """Everything that depends on the configuration alone, each part made when first used."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.task = get_task(config.task)
        self.splits = load_splits(config.data)
        self.num_labels = num_labels(config.data)
        self._dealt: list[np.ndarray] = []  # the rows of each client

    @cached_property
    def model(self) -> AdaptedModel:
        """The adapted model, on its device."""
        config = self.config
        network, classifier, targets = build_network(config.model, self.num_labels, config.seed)
        torch.nn.Module.to(network, pick_device(config.device))
        return AdaptedModel(
            network,
            classifier,
            lambda layers, size: make_method(config, layers, size),
            targets,
            train_classifier=config.classifier == "trained",
        )

    @property
    def label_names(self) -> list[str]:
        """The classes, in the order of the logits."""
        names: list[str] = self.splits["train"].features[self.config.data.label_column].names
        return names

    @cached_property
    def test_examples(self) -> Batch:
        """The server's own examples, which no client has."""
        return self.task.encode(self.splits["test"], self.config.data.label_column)

    @cached_property
    def _train_examples(self) -> Batch:
        return self.task.encode(self.splits["train"], self.config.data.label_column)

    def partition(self, partition_id: int, number: int) -> Examples:
        """A client's examples, when `number` clients share them."""
        config = self.config
        if len(self._dealt) != number:
            how = Partition(config.partition, config.partition_alpha, number, config.seed)
            self._dealt = deal_out(self.splits["train"], how, config.data.label_column)
        rows = self._dealt[partition_id]
        random = np.random.default_rng(derive(config.seed, "validation", partition_id))
        held_back = math.ceil(config.validation_share * len(rows))
        rows = random.permutation(rows) if held_back else rows
        return Examples(
            self._train_examples, train_rows=rows[held_back:], validation_rows=rows[:held_back]
        )
