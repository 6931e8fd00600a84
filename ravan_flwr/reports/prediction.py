"""Predict with a run's result: a row of the output for each row of the input, in the same order.

Input and output may be of any length: a batch of rows is in memory at a time.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ravan_flwr.data.rows import IMAGES, Row, UnreadableError, image_of, rows_of
from ravan_flwr.reports.load_run import result_of
from ravan_flwr.reports.table_file import Cells, Rows, check_new, new_table
from ravan_flwr.tasks.base import Columns
from ravan_flwr.tasks.extensions import Predicts, task_with
from ravan_flwr.training.local_steps import predictions
from ravan_flwr.training.model_and_data import ModelAndData

_NAMED = 20  # unreadable rows; the others are in the output alone


@dataclass
class Predicted:
    """Say how many rows there were, and which of them could not be read."""

    output: Path
    rows: int = 0
    unreadable: int = 0
    problems: list[str] = field(default_factory=list)  # the first few, by row


def predict(
    run: Path | str, data: Path | str, output: Path | str, client: int | None = None
) -> Predicted:
    """Write a new table with a prediction for each row of a file, or image of a folder.

    `client` is as for `result_of`.
    """
    data, output = Path(data).expanduser().absolute(), Path(output).expanduser()
    check_new(output)
    with result_of(run, client) as bench:
        task = task_with(Predicts, bench.task, "predict")
        needed = {role: name for role, name in task.data.columns if role != task.right}
        rows = rows_of(data, needed)
        by_file = data.is_dir() or data.suffix.lower() in IMAGES
        key: dict[str, type] = {"file": str} if by_file else {"row": int}
        kinds = {name: float if name == "probability" else str for name in task.prediction_columns}
        told = Predicted(output)
        with new_table(output, key | kinds | {"problem": str}) as table:
            for batch in _batches(_encoded(rows, _encoder(task, data)), task.evaluation_batch):
                _write(table, batch, _predict(bench, batch), len(task.prediction_columns), told)
            _check_some(data, told)
    return told


def _check_some(data: Path, told: Predicted) -> None:
    """Refuse data without one row that can be read: nothing is written then."""
    if not told.rows:
        raise ValueError(f"data = {str(data)!r}: it has no rows, expected some; name another file")
    if told.unreadable == told.rows:
        raise ValueError(
            f"data = {str(data)!r}: none of its {told.rows} rows can be read, the first since "
            f"{told.problems[0]}; correct it"
        )


@dataclass(frozen=True)
class _Encoded:
    """Hold a row, and what the network takes of it; None where it cannot be read."""

    row: Row
    inputs: Columns | None
    problem: str = ""


def _encoder(task: Predicts, data: Path) -> Callable[[Row], Columns]:
    """Make what encodes one row; it raises UnreadableError."""
    folder = data if data.is_dir() else data.parent

    def value_of(role: str, value: Any) -> Any:
        return image_of(value, folder) if role == "image" else task.checked(role, value)

    def encode(row: Row) -> Columns:
        if row.problem:
            raise UnreadableError(row.problem)
        values = {role: [value_of(role, value)] for role, value in row.values.items()}
        return task.inputs(values)

    return encode


def _encoded(rows: Iterable[Row], encode: Callable[[Row], Columns]) -> Iterator[_Encoded]:
    shapes: dict[str, tuple[int, ...]] = {}
    for row in rows:
        try:
            inputs = encode(row)
            here = {name: array.shape for name, array in inputs.items()}
            if (shapes := shapes or here) != here:
                told = f"it becomes {here}, expected {shapes} as the rows before"
                raise UnreadableError(told)
            yield _Encoded(row, inputs)
        except MemoryError:
            raise
        except UnreadableError as error:
            yield _Encoded(row, None, str(error))
        except Exception as error:  # noqa: BLE001 (readers raise what they like of a strange row)
            yield _Encoded(row, None, f"{type(error).__name__}: {error}")


def _batches(encoded: Iterator[_Encoded], size: int) -> Iterator[list[_Encoded]]:
    while batch := list(itertools.islice(encoded, size)):
        yield batch


def _predict(bench: ModelAndData, batch: Sequence[_Encoded]) -> Iterator[Cells]:
    """Predict for those rows of a batch that could be read, in their order."""
    inputs = [one.inputs for one in batch if one.inputs is not None]
    if not inputs:
        return iter(())
    arrays = {name: np.concatenate([one[name] for one in inputs]) for name in inputs[0]}
    return iter(predictions(bench.model, bench.task, arrays, bench.config.precision))


def _write(
    table: Rows,
    batch: Sequence[_Encoded],
    answers: Iterator[Cells],
    width: int,
    told: Predicted,
) -> None:
    """Write a batch's rows, and note those that could not be read."""
    for one in batch:
        told.rows += 1
        key = one.row.file or one.row.number
        if one.inputs is not None:
            table.write([key, *next(answers), None])
            continue
        told.unreadable += 1
        if len(told.problems) < _NAMED:
            told.problems.append(f"{one.row.name}: {one.problem}")
        table.write([key, *[None] * width, one.problem])
