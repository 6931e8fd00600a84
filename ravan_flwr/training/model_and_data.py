"""Build model, task and examples once per process, for all clients in it.

This is the project's only cache. In a simulation many clients share a process, sometimes with the
server. Each finds the model in its initial state, since `AdaptedModel.holding` resets it.
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
from ravan_flwr.adapters.stored import keep_casts, narrow, quantize
from ravan_flwr.config.run_config import Config
from ravan_flwr.data.examples import device_examples, load_splits, with_labels
from ravan_flwr.data.model_folder import model_folder
from ravan_flwr.data.partition import Partition, find_column, partition_rows, read_values
from ravan_flwr.data.rows import list_some
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import Method, Settings
from ravan_flwr.optional import ENCODE_EACH, load
from ravan_flwr.seeding import derive
from ravan_flwr.tasks import MACRO_F1, get_task
from ravan_flwr.tasks.base import Encoded, Task
from ravan_flwr.tasks.tally import Tally, macro_f1
from ravan_flwr.tasks.text import rounded_up
from ravan_flwr.training.adapted_model import AdaptedModel
from ravan_flwr.training.captured import CudaGraphs, GraphCache
from ravan_flwr.training.device import free_memory, pick_device, suitable_threads
from ravan_flwr.training.local_steps import LocalResult, evaluate_all
from ravan_flwr.training.network import (
    CONFIGS,
    backbone_dtype,
    backbone_fingerprint,
    build_network,
    captures_steps,
    computes_narrowly,
    keeps_casts,
    likely_device,
    prepare_network,
)
from ravan_flwr.training.step import DTYPES


def make_method(config: Config, layers: Sequence[Layer], size: int) -> Method:
    """Make the configured method for these layers; `size` counts the pretrained parameters."""
    made_here = {"init", "layer_form", "scale_clients"}
    names = {field.name for field in dataclasses.fields(Settings)} - made_here
    settings = {name: getattr(config, name) for name in names}
    # A merged weight in few bits loses small updates (adapters/merged.py).
    full_precision = config.precision == "float32" and config.quantize == "none"
    full_precision = full_precision and config.float32_matmul == "highest"
    settings["layer_form"] = "auto" if full_precision else "factored"
    settings["init"] = config.parse("init")[""]
    if isinstance(config.lora_scale, str):
        settings["lora_scale"] = config.parse("lora-scale")["alpha"]
        # Without a mean over clients there is no variance to make up for.
        alone = METHODS[config.method].all_clients
        settings["scale_clients"] = 1 if alone else config.clients_per_round
    return get_method(config.method)(Settings(**settings), layers, size)


def make_task(config: Config) -> Task:
    """Make the configured task; it loads its reader from the model's folder on first use."""
    spec, data = config.model, settle(config).data

    def folder() -> Path | None:
        return None if spec.source == "bundled" else model_folder(spec)

    return get_task(config.task)(
        data, config.max_length, folder, lambda: CONFIGS[spec.source](spec)
    )


def settle(config: Config) -> Config:
    """Fill in the labels from the data, if the preset does not list them."""
    if config.data.labels_known:
        return config
    return dataclasses.replace(config, data=with_labels(config.data))


@dataclass(frozen=True)
class Examples:
    """The examples of one client."""

    train: Encoded
    validation: Encoded  # empty with validation-share = 0


def make_partition(config: Config, number: int) -> Partition:
    """Return how these settings partition the training examples among `number` clients."""
    parts = config.parse("partition")
    amount = next((parts[name] for name in ("alpha", "classes", "shards") if name in parts), 0)
    return Partition(config.partition_scheme, amount, number, config.seed)


def validation_size(config: Config, number: int) -> int:
    """Return the size of the validation split of a client with `number` examples."""
    return math.ceil(config.validation_share * number)


@lru_cache(maxsize=1)
def get_model_and_data(config: Config) -> "ModelAndData":
    """Return the cached model and data of a configuration; another one replaces them."""
    return ModelAndData(config)


class ModelAndData:
    """Model, task and examples of a configuration, each created on first use."""

    def __init__(self, config: Config) -> None:
        self.config = config = settle(config)
        self.task = make_task(config)
        self._rows: list[np.ndarray] = []  # the rows of each client
        # Results of clients that were trained with others, before their own message is answered.
        self.trained_ahead: list[tuple[object, LocalResult]] = []
        self._local_examples: dict[str, Encoded] = {}  # a device's own examples, by path

    @cached_property
    def model(self) -> AdaptedModel:
        """Build the adapted model, on its device."""
        config = self.config
        self.task.check_sizes()
        self.task.check()
        device = pick_device(config.device)
        stored_dtype = backbone_dtype(config, device.type)
        backbone = build_network(config.model, self.task, config.seed, stored_dtype)
        if computes_narrowly(config, device.type):
            narrow(backbone.network, torch.bfloat16, backbone.classifier)
        if config.quantize != "none":  # before the move: unquantized, the network may not fit
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
        on_gpu = device.type == "cuda"
        if keeps_casts(config):
            keep_casts(model.network, multiple=8 if on_gpu else 1)
        if on_gpu and captures_steps(config):
            model.training_graphs = GraphCache(CudaGraphs())
            model.evaluation_graphs = GraphCache(CudaGraphs(), at_first=False)
            # At most eight lengths of texts.
            self.task.multiple = rounded_up(-(-self.task.max_length // 8), 8) or 1
        if on_gpu:  # of the process, for the model that it has
            high = config.float32_matmul == "tf32"
            torch.set_float32_matmul_precision("high" if high else "highest")
        return model

    @cached_property
    def backbone_fingerprint(self) -> str:
        """Return a hash of the pretrained files, which are read completely."""
        return backbone_fingerprint(self.config.model)

    @cached_property
    def splits(self) -> datasets.DatasetDict:
        """Load the shared data set; a device with its own examples loads none."""
        return load_splits(self.config.data)

    @cached_property
    def _train(self) -> datasets.Dataset:
        """Load the shared training examples, without those that cannot be learned."""
        return self.task.prepared(self.splits["train"])

    @cached_property
    def test_sets(self) -> dict[str, Encoded]:
        """Encode the server's test examples, which no client has."""
        names = dict(self.config.data.tests)
        return {name: self._placed(self.task.encode(self.splits[name])) for name in names}

    def evaluate(
        self, tally: Tally | None = None, sets: Mapping[str, Encoded] | None = None
    ) -> dict[str, float]:
        """Evaluate the model in its current state on the server's test sets, or on `sets`.

        With a tally the metrics have its macro-F1.
        """
        chosen = self.test_sets if sets is None else sets
        precision, size = self.config.precision, self.task.evaluation_batch
        measured = evaluate_all(self.model, self.task, chosen, size, precision, tally)
        if tally is not None:
            measured[MACRO_F1] = macro_f1(tally.by_class(self.task.data.labels))
        return measured

    @cached_property
    def _shared(self) -> Encoded:
        return self._placed(self.task.encode(self._train))

    def _placed(self, examples: Encoded) -> Encoded:
        """Return examples of one size in a GPU's memory, if they take little of what is free.

        Texts are cut to the longest one of a batch, whose length would have to be read from there.
        """
        config = self.config
        if (
            likely_device(config.device) != "cuda"
            or config.privacy == "example"
            or not len(examples)
        ):
            return examples
        if self.task.lengths(examples.select(np.arange(1))) is not None:
            return examples
        device = self.model.device
        return examples.on(device) if examples.nbytes < free_memory(device) / 4 else examples

    def partition(self, partition_id: int, number: int) -> Examples:
        """Return the examples of a client, one of `number`."""
        return self._split(self._shared.select(self.rows(number)[partition_id]), partition_id)

    def pooled(self, number: int) -> Encoded:
        """Return the training examples of all `number` clients, in the order of the shared data."""
        parts = [
            rows[self._split_rows(len(rows), partition_id)[0]]
            for partition_id, rows in enumerate(self.rows(number))
        ]
        return self._shared.select(np.sort(np.concatenate(parts)))

    def rows(self, number: int) -> list[np.ndarray]:
        """Return the rows of each of `number` clients."""
        config = self.config
        if len(self._rows) != number:
            column = find_column(config.data)
            if config.partition_scheme == "natural":
                self._check_users(column)
            self._rows = partition_rows(self._train, make_partition(config, number), column)
        return self._rows

    def _check_users(self, column: str) -> None:
        """Raise ValueError if a client of a natural partition has no usable example."""
        examples, train = self.splits["train"], self._train
        if train.num_rows == examples.num_rows:
            return
        if lost := set(read_values(examples, column)) - set(read_values(train, column)):
            raise ValueError(
                f"partition = 'natural': no example of {list_some(sorted(map(repr, lost)))} can be "
                f"learned, expected one for each value of {column!r}; take these out of the data"
            )

    def partition_sizes(self, number: int) -> list[int]:
        """Return the number of training examples of each of `number` clients."""
        rows = self.rows(number)
        return [len(part) - validation_size(self.config, len(part)) for part in rows]

    def device_examples(self, path: str, partition_id: int) -> Examples:
        """Read and encode a device's own examples."""
        if path not in self._local_examples:
            examples = device_examples(path, self.config.data)
            private = self.config.privacy == "example"
            self._local_examples[path] = (
                load(ENCODE_EACH)(self.task, examples)
                if private
                else self._placed(self.task.encode(examples))
            )
        return self._split(self._local_examples[path], partition_id)

    def _split(self, examples: Encoded, partition_id: int) -> Examples:
        """Split a client's examples into training and validation."""
        train, validation = self._split_rows(len(examples), partition_id)
        return Examples(examples.select(train), examples.select(validation))

    def _split_rows(self, number: int, partition_id: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of a client's training examples, and of its validation split."""
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
