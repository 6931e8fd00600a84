"""Build model, task and examples once a process, and lend them to every client.

This is the project's one cache. In a simulation many clients share a process, and the
server shares it with them when everything runs in one; each finds the model as it was,
since `AdaptedModel.holding` puts everything back.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import datasets
import numpy as np
import torch

from ravan_flwr.adapters import Layer
from ravan_flwr.adapters.stored import keep_casts, quantize
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.examples import load_splits, own_examples, settled, some_of
from ravan_flwr.data.model_folder import model_folder
from ravan_flwr.data.partition import (
    BY_COLUMN,
    Partition,
    check_column,
    column_of,
    partition_rows,
    values_of,
)
from ravan_flwr.methods import get_method
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.seeding import derive
from ravan_flwr.tasks import TASKS, get_task
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.device import pick_device, suitable_threads
from ravan_flwr.training.local_steps import evaluate_all
from ravan_flwr.training.network import (
    CONFIGS,
    DTYPES,
    backbone_dtype,
    backbone_fingerprint,
    build_network,
    keeps_casts,
    prepare_network,
)
from ravan_flwr.training.private_steps import encode_each


def make_method(config: Config, layers: Sequence[Layer], size: int) -> Method:
    """Make the configuration's method, over these layers of a network of that size."""
    names = {field.name for field in dataclasses.fields(Settings)} - {"init", "layer_form"}
    settings = {name: getattr(config, name) for name in names}
    # A merged weight of few bits loses every small update (adapters/merged.py).
    full_precision = config.precision == "float32" and config.quantize == "none"
    settings["layer_form"] = "auto" if full_precision else "factored"
    settings["init"] = config.parts("init")[""]
    return get_method(config.method)(Settings(**settings), layers, size)


def make_task(config: Config) -> Task:
    """Make the configuration's task; it asks the model's folder for a reader when it needs one."""
    spec, data = config.model, settle(config).data

    def folder() -> Path | None:
        return None if spec.source == "bundled" else model_folder(spec)

    settings = {key: getattr(config, key.replace("-", "_")) for key in TASKS[config.task].keys}
    return get_task(config.task)(
        data, config.max_length, folder, lambda: CONFIGS[spec.source](spec), settings
    )


def settle(config: Config) -> Config:
    """Fill in what the preset leaves to the data: the labels."""
    if config.data.settled:
        return config
    return dataclasses.replace(config, data=settled(config.data))


@dataclass(frozen=True)
class Examples:
    """Hold what one client has."""

    train: Encoded
    validation: Encoded  # held back from training; empty unless asked for


def partition_of(config: Config, number: int) -> Partition:
    """Say how so many clients share the training examples under these settings."""
    parts = config.parts("partition")
    amount = next((parts[name] for name in ("alpha", "classes", "shards") if name in parts), 0)
    return Partition(config.division, amount, number, config.seed)


def column_for(config: Config, train: datasets.Dataset) -> str:
    """Find the column by which clients are to differ; ValueError if the partition lacks it."""
    if config.division in BY_COLUMN:
        check_column(config.data, train)
    return column_of(config.data)


def validation_size(config: Config, number: int) -> int:
    """Count how many of a client's so many examples are evaluated on."""
    return math.ceil(config.validation_share * number)


@lru_cache(maxsize=1)
def get_model_and_data(config: Config) -> "ModelAndData":
    """Get the model and data of this configuration; the one before it is let go."""
    return ModelAndData(config)


class ModelAndData:
    """Hold everything that depends on the configuration alone, each part made when first used."""

    def __init__(self, config: Config) -> None:
        self.config = config = settle(config)
        self.task = make_task(config)
        self._rows: list[np.ndarray] = []  # the rows of each client
        self._own: dict[str, Encoded] = {}  # a device's own examples, by path

    @cached_property
    def model(self) -> AdaptedModel:
        """Build the adapted model, on its device."""
        config = self.config
        self.task.check_sizes()
        self.task.check()
        device = pick_device(config.device)
        stored_dtype = backbone_dtype(config, device.type)
        backbone = build_network(config.model, self.task, config.seed, stored_dtype)
        if config.quantize != "none":  # before the rest moves: whole, it may not fit the device
            dtype = DTYPES[config.precision]
            quantize(backbone.network, config.quantize, backbone.classifier, dtype, device)
        torch.nn.Module.to(backbone.network, device)
        prepare_network(backbone.network, config)
        model = AdaptedModel(
            backbone,
            lambda layers, size: make_method(config, layers, size),
            train_classifier=config.classifier == "trained",
            threads=suitable_threads(backbone.size, config.batch_size),
        )
        if keeps_casts(config):
            keep_casts(model.network)
        return model

    @cached_property
    def backbone_fingerprint(self) -> str:
        """Hash what is pretrained, which reads the whole of it."""
        return backbone_fingerprint(self.config.model)

    @cached_property
    def splits(self) -> datasets.DatasetDict:
        """Load the shared data set; a device with its own examples loads none."""
        return load_splits(self.config.data)

    @cached_property
    def _train(self) -> datasets.Dataset:
        """Load what clients share, without examples that cannot be learned."""
        return self.task.prepared(self.splits["train"])

    @cached_property
    def test_sets(self) -> dict[str, Encoded]:
        """Encode the server's own examples, which no client has."""
        names = dict(self.config.data.tests)
        return {name: self.task.encode(self.splits[name]) for name in names}

    def evaluate(
        self, tally: Tally | None = None, sets: Mapping[str, Encoded] | None = None
    ) -> dict[str, float]:
        """Evaluate the model as it is now: on the server's examples, or on other ones."""
        chosen = self.test_sets if sets is None else sets
        precision, size = self.config.precision, self.task.evaluation_batch
        return evaluate_all(self.model, self.task, chosen, size, precision, tally)

    @cached_property
    def _shared(self) -> Encoded:
        return self.task.encode(self._train)

    def partition(self, partition_id: int, number: int) -> Examples:
        """Get a client's examples, when `number` clients share them."""
        return self._split(self._shared.select(self.rows(number)[partition_id]), partition_id)

    def pooled(self, number: int) -> Encoded:
        """Get what `number` clients train on, all of it, in the order of the shared examples."""
        parts = [
            rows[self._split_rows(len(rows), partition_id)[0]]
            for partition_id, rows in enumerate(self.rows(number))
        ]
        return self._shared.select(np.sort(np.concatenate(parts)))

    def rows(self, number: int) -> list[np.ndarray]:
        """Partition the rows, when `number` clients share the examples."""
        config = self.config
        if len(self._rows) != number:
            column = column_for(config, self._train)
            if config.division == "natural":
                self._check_users(column)
            self._rows = partition_rows(self._train, partition_of(config, number), column)
        return self._rows

    def _check_users(self, column: str) -> None:
        """Raise ValueError if no example of a client of a natural partition can be learned."""
        examples, train = self.splits["train"], self._train
        if train.num_rows == examples.num_rows:
            return
        if lost := set(values_of(examples, column)) - set(values_of(train, column)):
            raise ValueError(
                f"partition = 'natural': no example of {some_of(sorted(map(repr, lost)))} can be "
                f"learned, expected one for each value of {column!r}; take these out of the data"
            )

    def partition_sizes(self, number: int) -> list[int]:
        """Count the examples that each client trains on, when `number` clients share them."""
        rows = self.rows(number)
        return [len(part) - validation_size(self.config, len(part)) for part in rows]

    def own_examples(self, path: str, partition_id: int) -> Examples:
        """Read a device's own examples."""
        if path not in self._own:
            examples = own_examples(path, self.config.data)
            private = self.config.privacy == "example"
            self._own[path] = (
                encode_each(self.task, examples) if private else self.task.encode(examples)
            )
        return self._split(self._own[path], partition_id)

    def _split(self, examples: Encoded, partition_id: int) -> Examples:
        """Hold back what the client is evaluated on."""
        train, validation = self._split_rows(len(examples), partition_id)
        return Examples(examples.select(train), examples.select(validation))

    def _split_rows(self, number: int, partition_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Choose which of a client's so many examples it trains on, and which it holds back."""
        config, rows = self.config, np.arange(number)
        size = validation_size(config, len(rows))
        if size:
            random = np.random.default_rng(derive(config.seed, "validation", partition_id))
            rows = random.permutation(rows)
        if size >= len(rows):
            raise ValueError(
                f"validation-share = {config.validation_share}: a client with {len(rows)} "
                f"example{'s' * (len(rows) != 1)} would have none left to train on, since "
                f"{size} would be its validation split; "
                + ("lower it, or " if number > 1 else "")
                + "use fewer clients"
            )
        return rows[size:], rows[:size]
