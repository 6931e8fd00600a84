"""Predict with a run's result: a row of the output for each row of the input, in the same order.

Input and output may be of any length: a batch of rows is in memory at a time.
"""

import itertools
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ravan_flwr.data.rows import IMAGES, Row, UnreadableError, image_of, rows_of
from ravan_flwr.reports.evaluation import result_of
from ravan_flwr.tasks.base import Columns
from ravan_flwr.tasks.extensions import Predicts, task_with
from ravan_flwr.training.local_steps import predictions
from ravan_flwr.training.model_and_data import ModelAndData

Cells = Sequence[str | float | int | None]
Kinds = Mapping[str, type]  # of the columns, by name: str, int or float

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a formula begins with
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_ROWS_AT_ONCE = 8192  # small groups of rows make a parquet file large and slow
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}


class _JsonLines:
    """Write tables as pyarrow's own writers do, an object a line."""

    def __init__(self, file: IO[bytes], _: Any) -> None:
        self.file = file

    def write_table(self, table: Any) -> None:
        for row in table.to_pylist():
            self.file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Leave the file to the one who opened it."""


_WRITERS: dict[str, Callable[[IO[bytes], Any], Any]] = {
    ".csv": pyarrow.csv.CSVWriter,
    ".jsonl": _JsonLines,
    ".parquet": pyarrow.parquet.ParquetWriter,
}


class Rows:
    """Take rows, and hand many at once to a writer."""

    def __init__(self, writer: Any, schema: Any, *, spreadsheets: bool) -> None:
        self._writer, self._schema, self._spreadsheets = writer, schema, spreadsheets
        self._rows: list[Cells] = []

    def write(self, cells: Cells) -> None:
        """Take a row."""
        cells = [_utf8(cell) for cell in cells]
        self._rows.append([no_formula(cell) for cell in cells] if self._spreadsheets else cells)
        if len(self._rows) >= _ROWS_AT_ONCE:
            self.flush()

    def flush(self) -> None:
        """Write the rows that were taken."""
        columns = zip(*self._rows, strict=True)
        kinds = zip(columns, self._schema, strict=bool(self._rows))
        arrays = [pa.array(column, field.type) for column, field in kinds]
        if arrays:
            self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows = []


@contextmanager
def new_table(path: Path, kinds: Kinds) -> Iterator[Rows]:
    """Open a new file for rows; it has its name once the block ends well."""
    check_new(path)
    kind, temporary = path.suffix.lower(), path.with_name(f".{path.name}.{os.getpid()}.tmp")
    schema = pa.schema([(name, _ARROW[kind]) for name, kind in kinds.items()])
    try:
        with temporary.open("wb") as file:
            with closing(_WRITERS[kind](file, schema)) as writer:
                rows = Rows(writer, schema, spreadsheets=kind == ".csv")
                yield rows
                rows.flush()
            file.flush()
            os.fsync(file.fileno())
        try:
            os.link(temporary, path)  # unlike a rename, it replaces nothing
        except OSError:  # there is a file now, or no link on this file system
            check_new(path)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_new(path: Path) -> None:
    """Refuse a file that is there, of an unknown kind, or in no folder."""
    if path.suffix.lower() not in _WRITERS:
        raise ValueError(
            f"output = {str(path)!r}: expected a name that ends in {', '.join(_WRITERS)}; change it"
        )
    if path.exists():
        raise ValueError(f"output = {str(path)!r} is there already, expected a new file; name one")
    if not path.parent.is_dir():
        raise ValueError(f"output = {str(path)!r}: found no folder {path.parent}; make it first")


def no_formula(cell: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would compute; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def _utf8(cell: Any) -> Any:
    """Make a text one that UTF-8 can hold: names of files may be none."""
    if not isinstance(cell, str):
        return cell
    return cell.encode("utf-8", "backslashreplace").decode("utf-8")


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
        needed = {role: name for role, name in task.data.columns if role in task.given}
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
