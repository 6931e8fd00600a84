"""What a process builds once and then lends to every client: model, task, examples.

This is the project's one cache. In a simulation many clients share a process, and the
server shares it with them when everything runs in one; each finds the model as it was,
since `AdaptedModel.holding` puts everything back.
"""

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
from flwr_datasets.partitioner import Partitioner

from ravan_flwr.config import Config
from ravan_flwr.dataset import Partition, load_splits, make_partitioner
from ravan_flwr.methods import get_method
from ravan_flwr.methods.base import Settings
from ravan_flwr.model import AdaptedModel, build_network, pick_device
from ravan_flwr.seeding import derive
from ravan_flwr.tasks import get_task
from ravan_flwr.tasks.base import Batch


@dataclass(frozen=True)
class Examples:
    """What one client has."""

    train: Batch
    validation: Batch | None

    @property
    def number(self) -> int:
        """How many it trains on."""
        return len(next(iter(self.train.values())))


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
        self.num_labels = self.splits["train"].features[config.data.label_column].num_classes
        self._partitioner: tuple[int, Partitioner] | None = None
        self._partitions: dict[int, Examples] = {}

    @cached_property
    def model(self) -> AdaptedModel:
        """The adapted model, on its device."""
        config = self.config
        settings = Settings(
            seed=config.seed,
            lora_rank=config.lora_rank,
            rank=config.rank,
            heads=config.heads,
            init=config.init,
            init_scale=config.init_scale,
            scaling=config.scaling,
            scoring=config.scoring,
            selection=config.selection,
        )
        network, classifier, targets = build_network(config.model, self.num_labels, config.seed)
        network.to(pick_device(config.device))
        return AdaptedModel(
            network,
            classifier,
            lambda layers: get_method(config.method)(settings, layers),
            targets,
            train_classifier=config.classifier == "trained",
        )

    @cached_property
    def test_examples(self) -> Batch:
        """The server's own examples, which no client has."""
        return self.task.encode(self.splits["test"], self.config.data.label_column)

    def partition(self, partition_id: int, number: int) -> "Examples":
        """A client's examples, when `number` clients share them."""
        if self._partitioner is None or self._partitioner[0] != number:
            config = self.config
            how = Partition(config.partition, config.partition_alpha, number, config.seed)
            partitioner = make_partitioner(self.splits["train"], how, config.data.label_column)
            self._partitioner, self._partitions = (number, partitioner), {}
        if partition_id not in self._partitions:
            self._partitions[partition_id] = self._encode(partition_id)
        return self._partitions[partition_id]

    def _encode(self, partition_id: int) -> "Examples":
        assert self._partitioner is not None
        rows = self._partitioner[1].load_partition(partition_id)
        column, share = self.config.data.label_column, self.config.validation_share
        held_back = math.ceil(share * len(rows))
        order = np.random.default_rng(derive(self.config.seed, "validation", partition_id))
        shuffled = order.permutation(len(rows))
        train = rows.select(np.sort(shuffled[held_back:]))
        validation = rows.select(np.sort(shuffled[:held_back]))
        return Examples(
            train=self.task.encode(train, column),
            validation=self.task.encode(validation, column) if held_back else None,
        )
