"""Define what a task is: how examples become tensors, what the loss and the metrics are."""

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

EVALUATION_BATCH = 256  # examples of an evaluation, or of a prediction, at a time
IN_MEMORY = 2**28  # bytes of encoded examples; what is larger is read from its file


@dataclass(frozen=True)
class Encoded:
    """Hold examples as tensors, each of one shape, in memory or in a memory-mapped file.

    `answers` are the right answers of each, for tasks that are measured on texts.
    """

    table: Batch | datasets.Dataset
    rows: np.ndarray  # which of the table
    answers: Sequence[Sequence[str]] = ()

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, rows: np.ndarray) -> "Encoded":
        """Select some of the examples."""
        return replace(self, rows=self.rows[rows])

    def take(self, rows: np.ndarray) -> Batch:
        """Make a batch of these rows."""
        chosen = self.rows[rows]
        if isinstance(self.table, dict):
            index = torch.from_numpy(chosen)
            return {name: tensor[index] for name, tensor in self.table.items()}
        return tensors_of(self.table, chosen)

    def only(self, name: str) -> "Encoded":
        """Leave out all tensors but one, which then is all that is read of a file."""
        table = self.table
        column = {name: table[name]} if isinstance(table, dict) else table.select_columns(name)
        return replace(self, table=column)

    def answers_of(self, rows: np.ndarray) -> list[Sequence[str]]:
        """List the right answers of these rows; none where a label is all there is."""
        return [self.answers[row] for row in self.rows[rows]] if self.answers else []


@dataclass(frozen=True)
class Measures:
    """Say which means an evaluation has, over what, and what follows from them."""

    names: Sequence[str] = ("loss", "accuracy")  # that clients report
    unit: str = "examples"  # what these are means over: examples or tokens
    most: int = 1  # units that an example has, at most
    completed: Callable[[Mapping[str, float]], dict[str, float]] = dict

    def means(self, sums: Mapping[str, float], examples: int) -> dict[str, float]:
        """Make means of what was measured on so many examples, and what follows from them."""
        number = sums.get(self.unit, examples)
        means = {name: value / number for name, value in sums.items() if name != self.unit}
        return self.completed(means)


class Task(ABC):
    """Define one kind of learning problem, on one data set, for one model.

    What only some commands and options ask of a task stands in extensions.py: predictions, texts
    side by side, gradients of each example.

    `reader` is what turns examples into numbers as the model expects: an image processor or a
    tokenizer, from the model's folder; None for a model that travels with the app.
    """

    metric: str  # the name of the metric by which runs are compared
    classifies: ClassVar[bool] = True  # one label of several is right, and a tally counts them
    auto_class: ClassVar[str]  # of transformers, which finds the class of an architecture
    pipeline: ClassVar[str]  # of transformers, for a trained model; "" where there is none
    peft_type: ClassVar[str | None] = None  # PEFT's name for what an adapter of the task does
    masks: ClassVar[bool] = True  # attention is given a mask, where its examples may be padded

    def __init__(
        self, data: DataSpec, max_length: int, model_folder: Callable[[], Path | None],
        model_config: Callable[[], Mapping[str, Any]] = dict,
        settings: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        self.data, self.max_length = data, max_length
        self.settings = settings or {}  # of the keys that its row names
        self._model_folder, self._model_config = model_folder, model_config

    @cached_property
    def reader(self) -> Any:
        """Load the reader when it is first needed: a plan needs none."""
        folder = self._model_folder()
        if folder is None:
            return None
        with no_bars():
            return self.load_reader(folder)

    @cached_property
    def model_config(self) -> Mapping[str, Any]:
        """Read what the model's config.json says."""
        return self._model_config()

    @abstractmethod
    def load_reader(self, folder: Path) -> Any:
        """Load the model's own reader."""

    def check_sizes(self) -> None:  # noqa: B027 (most models take any)
        """Refuse sizes that the model does not have, by its config.json alone."""

    def check(self) -> None:  # noqa: B027 (most can do what any reader can)
        """Refuse what cannot be learned with the model's reader, before anything is trained."""

    def prepared(self, examples: datasets.Dataset) -> datasets.Dataset:
        """Leave out, before examples are partitioned, those that cannot be learned."""
        return examples

    @abstractmethod
    def encode(self, examples: datasets.Dataset) -> Encoded:
        """Encode all examples as tensors, once, before training; columns are named by role."""

    def adjust(self, network: nn.Module) -> None:  # noqa: B027 (most networks are ready)
        """Tell the network what it has to know of the reader."""

    @property
    def outputs(self) -> int:
        """Return how many numbers the network puts out: one for each label."""
        return len(self.data.labels)

    @abstractmethod
    def shapes(self, config: Any, batch_size: int) -> Shapes:
        """Give shape and dtype of every tensor of a batch, for a model of that configuration."""

    @property
    def cut_at(self) -> int:
        """Return how many tokens of a text others are to read, too."""
        return self.max_length

    def lengths(self, examples: Encoded) -> np.ndarray | None:
        """Count what of each example is no padding; None where all have one shape."""
        return None

    def collate(self, batch: Batch) -> Batch:
        """Bring a batch into the form in which it goes to the device."""
        return batch

    @property
    def evaluation_batch(self) -> int:
        """Return how many examples are evaluated, or predicted for, at a time."""
        return EVALUATION_BATCH

    def transient(self, config: Any, batch_size: int) -> int:
        """Count the bytes that a step takes for a moment, beside what it keeps or computes."""
        return 0

    def size(self, batch: Batch) -> int:
        """Return over how many things `loss` is the mean: examples."""
        return len(next(iter(batch.values())))

    @abstractmethod
    def loss(self, network: nn.Module, batch: Batch) -> Tensor:
        """Compute the mean loss over the batch."""

    @abstractmethod
    def measure(
        self, network: Any, batch: Batch, answers: Sequence[Sequence[str]],
        tally: Tally | None = None,
    ) -> dict[str, float]:  # fmt: skip
        """Measure `loss` and the metrics, as sums over the batch; count the labels if asked to.

        Where the measures' unit is not examples, there is a sum of that name to divide by.
        """

    @property
    def measures(self) -> Measures:
        """Return what an evaluation's sums become."""
        return Measures(("loss", self.metric))


def as_rows(columns: Mapping[str, Sequence[Any]], roles: Sequence[str]) -> list[dict[str, Any]]:
    """Return a batch of columns as its examples, each by these roles."""
    values = zip(*(columns[role] for role in roles), strict=True)
    return [dict(zip(roles, row, strict=True)) for row in values]


def mapped(
    examples: datasets.Dataset, function: Callable[[Mapping[str, Any]], Mapping[str, Any]],
    features: Mapping[str, Any], settings: Mapping[str, Any], keep: Sequence[str] = (),
) -> datasets.Dataset:  # fmt: skip
    """Make new columns of all examples, and keep some of the old ones as they are.

    They are cached. `settings` has what `function` depends on beside the examples and its code.
    """
    key = json.dumps([examples._fingerprint, settings], sort_keys=True, default=str)
    folder = Path(__file__).parent  # with whatever `function` may call
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
    """Let one process at a time make what is not in the cache: the others find it there."""
    for file in examples.cache_files[:1]:
        # As `datasets` names it.
        made = Path(file["filename"]).parent / f"cache-{fingerprint}.arrow"
        if not made.exists():
            with FileLock(f"{made}.lock"):
                yield
            return
    yield


def encoded_as_it_is(encoded: datasets.Dataset) -> Encoded:
    """Take columns of numbers as encoded examples: in memory, or large ones from their file."""
    rows = np.arange(len(encoded))
    small = encoded.data.nbytes <= IN_MEMORY
    return Encoded(tensors_of(encoded, rows) if small else encoded, rows)


def tensors_of(encoded: datasets.Dataset, rows: np.ndarray) -> Batch:
    """Read some rows as tensors of the types that they have in the file, which no format keeps."""
    selection: np.ndarray | slice = rows
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        selection = slice(int(rows[0]), int(rows[-1]) + 1)  # which is read many times faster
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
