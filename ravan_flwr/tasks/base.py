"""Define the base class of tasks: how examples become tensors, and the loss and metrics."""

import hashlib
import inspect
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import datasets
import numpy as np
import pyarrow as pa
import torch
from filelock import FileLock
from torch import Tensor, nn

from ravan_flwr.data.hub import no_bars
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.tally import Tally

Shapes = dict[str, tuple[tuple[int, ...], torch.dtype]]
Batch = dict[str, Tensor]  # every tensor's first dimension runs over the examples
Columns = dict[str, np.ndarray]

EVALUATION_BATCH = 256  # examples that are evaluated or predicted at a time
IGNORED = -100  # a label without a loss: padding
BLOCK = 4096  # examples that are copied to a device at a time
IN_MEMORY = 2**28  # bytes of encoded examples in memory; larger tables are read from their file


@dataclass(frozen=True)
class Encoded:
    """Examples as tensors of fixed shapes, in memory or in a memory-mapped file.

    `answers` has the correct answers of each example, for tasks that are scored on texts.
    """

    table: Batch | datasets.Dataset
    rows: np.ndarray  # the table's rows that are examples here
    answers: Sequence[Sequence[str]] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: np.ndarray) -> "Encoded":
        """Return the examples of these rows."""
        return replace(self, rows=self.rows[rows])

    def take(self, rows: np.ndarray) -> Batch:
        """Return a batch of these rows."""
        chosen = self.rows[rows]
        if isinstance(self.table, dict):
            index = torch.from_numpy(chosen).to(self.device, non_blocking=True)
            return {name: tensor.index_select(0, index) for name, tensor in self.table.items()}
        return read_tensors(self.table, chosen)

    @property
    def device(self) -> torch.device:
        """Return the device from which examples are read."""
        in_memory = isinstance(self.table, dict)
        return next(iter(self.table.values())).device if in_memory else torch.device("cpu")

    @property
    def nbytes(self) -> int:
        """Return the size of the table."""
        if isinstance(self.table, dict):
            return sum(tensor.nbytes for tensor in self.table.values())
        return int(self.table.data.nbytes)

    def on(self, device: torch.device) -> "Encoded":
        """Return the examples with their whole table in the memory of a device."""
        if isinstance(self.table, dict):
            return replace(self, table={n: t.to(device) for n, t in self.table.items()})
        number, table = len(self.table), Batch()
        for rows in np.array_split(np.arange(number), -(-number // BLOCK)):
            for name, tensor in read_tensors(self.table, rows).items():
                if name not in table:
                    table[name] = tensor.new_empty(number, *tensor.shape[1:], device=device)
                table[name][rows[0] : rows[-1] + 1] = tensor
        return replace(self, table=table)

    def only(self, name: str) -> "Encoded":
        """Return the examples with this tensor only; no other is then read from a file."""
        table = self.table
        column = {name: table[name]} if isinstance(table, dict) else table.select_columns(name)
        return replace(self, table=column)

    def read_answers(self, rows: np.ndarray) -> list[Sequence[str]]:
        """Return the correct answers of these rows; an empty list for tasks with labels only."""
        return [self.answers[row] for row in self.rows[rows]] if self.answers else []


@dataclass(frozen=True)
class Measures:
    """The means that an evaluation reports, their unit, and metrics that are derived from them."""

    names: Sequence[str] = ("loss", "accuracy")  # that clients report
    unit: str = "examples"  # over which means are taken: examples or tokens
    max_per_example: int = 1  # units per example, at most
    completed: Callable[[Mapping[str, float]], dict[str, float]] = dict  # adds derived metrics

    def means(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        """Return the means, and the metrics derived from them, for sums over the examples."""
        number = sums.get(self.unit, examples)
        means = {name: value / number for name, value in sums.items() if name != self.unit}
        return self.completed(means)


class Task(ABC):
    """Define one kind of learning problem, on one data set, for one model.

    extensions.py has what only some commands and options need: predictions, packing, and
    gradients by example.

    `reader` turns examples into the model's inputs: an image processor or a tokenizer from the
    model's folder; None for a model that is bundled with the app.
    """

    metric: str  # the name of the metric by which runs are compared
    classifies: ClassVar[bool] = True  # whether labels are predicted, which a tally counts
    auto_class: ClassVar[str]  # transformers' auto class that loads the network
    pipeline: ClassVar[str]  # transformers' pipeline for a trained model; "" if there is none
    peft_type: ClassVar[str | None] = None  # PEFT's task type
    reads: ClassVar[str] = "texts"  # or images
    multiple: int = 1  # of a batch's length in tokens: captured steps need few lengths
    masks: ClassVar[bool] = True  # whether attention gets a mask when examples may be padded

    def __init__(
        self, data: DataSpec, max_length: int, model_folder: Callable[[], Path | None],
        model_config: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:  # fmt: skip
        self.data, self.max_length = data, max_length
        self._model_folder, self._model_config = model_folder, model_config

    @cached_property
    def reader(self) -> Any:
        """Return the reader, loaded when it is first needed: a plan needs none."""
        folder = self._model_folder()
        if folder is None:
            return None
        with no_bars():
            return self.load_reader(folder)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """Return the content of the model's config.json."""
        return self._model_config()

    @abstractmethod
    def load_reader(self, folder: Path) -> Any:
        """Load the model's tokenizer or image processor; None if the task needs none."""

    def check_sizes(self) -> None:  # noqa: B027 (most models take any size)
        """Raise ValueError for sizes that the model does not support, by its config.json alone."""

    def check(self) -> None:  # noqa: B027 (most tasks work with any reader)
        """Raise ValueError if the task cannot be trained with the model's reader."""

    def prepared(self, examples: datasets.Dataset) -> datasets.Dataset:
        """Return the examples that can be learned; this is called before partitioning."""
        return examples

    @abstractmethod
    def encode(self, examples: datasets.Dataset) -> Encoded:
        """Encode all examples as tensors, once, before training; columns are named by role."""

    def adjust(self, network: nn.Module) -> None:  # noqa: B027 (most networks need nothing)
        """Set the network's options that depend on the reader or the task."""

    @property
    def outputs(self) -> int:
        """Return the number of the network's outputs: one for each label."""
        return len(self.data.labels)

    @abstractmethod
    def shapes(self, config: Any, batch_size: int) -> Shapes:
        """Return shape and dtype of every tensor of a batch, for a model of that configuration."""

    @property
    def cut_at(self) -> int:
        """Return the maximum length that an exported tokenizer gets, in tokens."""
        return self.max_length

    def lengths(self, examples: Encoded) -> np.ndarray | None:
        """Return each example's number of tokens without padding; None if all are equally long."""
        return None

    def collate(self, batch: Batch) -> Batch:
        """Convert a batch to the form that is sent to the accelerator."""
        return batch

    @property
    def evaluation_batch(self) -> int:
        """Return how many examples are evaluated or predicted at a time."""
        return EVALUATION_BATCH

    def transient(self, config: Any, batch_size: int) -> int:
        """Return the bytes that a step allocates temporarily, besides saved tensors and results."""
        return 0

    def size(self, batch: Batch) -> int:
        """Return the number of units that `loss` averages over: examples by default."""
        return len(next(iter(batch.values())))

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Return the mean loss over the batch."""

    @abstractmethod
    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Return `loss` and the metrics, as sums over the batch; add the labels to a given tally.

        If the measures' unit is not examples, the result also has the number of units.
        """

    @property
    def measures(self) -> Measures:
        """Return which means an evaluation reports, and how they follow from its sums."""
        return Measures(("loss", self.metric))


def as_rows(columns: Mapping[str, Sequence[Any]], roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return the examples of a batch of columns, each as a mapping of these roles to values."""
    values = zip(*(columns[role] for role in roles), strict=True)
    return [dict(zip(roles, row, strict=True)) for row in values]


def mapped(
    examples: datasets.Dataset, function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    features: Mapping[str, Any], settings: Mapping[str, Any], keep: Sequence[str] = (),
) -> datasets.Dataset:  # fmt: skip
    """Apply `function` to all examples, batch by batch; `keep` names old columns to keep.

    The result is cached by the examples, the code and `settings`. So `settings` must have
    everything else that `function` depends on.
    """
    key = json.dumps([examples._fingerprint, settings], sort_keys=True, default=str)
    folder = Path(__file__).parent  # of the code that `function` may call
    files = [Path(inspect.getfile(function)), *sorted(folder.glob("*.py"))]
    code = b"".join(path.read_bytes() for path in (*files, folder.parent / "data/rows.py"))
    fingerprint = hashlib.sha256(key.encode() + code).hexdigest()[:16]
    with no_bars(), _one_process(examples, fingerprint):
        return examples.map(
            function,
            batched=True,
            batch_size=256,
            remove_columns=[name for name in examples.column_names if name not in keep],
            features=datasets.Features({n: examples.features[n] for n in keep} | dict(features)),
            new_fingerprint=fingerprint,
        )


@contextmanager
def _one_process(examples: datasets.Dataset, fingerprint: str) -> Iterator[None]:
    """Let one process at a time write a missing cache file; the others then read it."""
    for file in examples.cache_files[:1]:
        # The name that `datasets` gives it.
        cache_file = Path(file["filename"]).parent / f"cache-{fingerprint}.arrow"
        if not cache_file.exists():
            with FileLock(f"{cache_file}.lock"):
                yield
            return
    yield


def encoded_as_it_is(encoded: datasets.Dataset) -> Encoded:
    """Return columns of numbers as encoded examples: small ones in memory, large ones by file."""
    rows = np.arange(len(encoded))
    small = encoded.data.nbytes <= IN_MEMORY
    return Encoded(read_tensors(encoded, rows) if small else encoded, rows)


def read_tensors(encoded: datasets.Dataset, rows: np.ndarray) -> Batch:
    """Return rows as tensors of the file's types, which no format of `datasets` preserves."""
    selection: np.ndarray | slice = rows
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        selection = slice(int(rows[0]), int(rows[-1]) + 1)  # a slice is read many times faster
    table = encoded.with_format("arrow")[selection]
    tensors = {}
    for name, feature in encoded.features.items():
        is_list = isinstance(feature, datasets.List)
        shape = (feature.length,) if is_list else tuple(getattr(feature, "shape", ()))
        values = table[name].combine_chunks()
        values = getattr(values, "storage", values)
        while pa.types.is_nested(values.type):
            values = values.flatten()
        array = values.to_numpy(zero_copy_only=False).reshape(len(rows), *shape)
        tensors[name] = torch.from_numpy(array.copy())
    return tensors
