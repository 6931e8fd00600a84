"""Predict with a run's result: one output row for each input row, in the same order.

Input and output may be of any length: a batch of rows is in memory at a time.
"""

import dataclasses
import itertools
import json
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from ravan_flwr.data.rows import IMAGES, Row, UnreadableError, read_columns, read_image, read_rows
from ravan_flwr.files import flush
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.tasks.base import Columns
from ravan_flwr.tasks.extensions import Predicts, task_with
from ravan_flwr.training.local_steps import predict_batch
from ravan_flwr.training.model_and_data import ModelAndData

Cells = Sequence[str | float | int | None]
_Item = TypeVar("_Item")
ColumnTypes = Mapping[str, type]  # of the columns, by name: str, int or float

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # first characters of a formula
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")
_ROWS_AT_ONCE = 8192  # small groups of rows make a parquet file large and slow
_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}


class _JsonLines:
    """Write tables as JSON lines, with the interface of pyarrow's writers."""

    def __init__(self, file: IO[bytes], _: Any) -> None:
        self.file = file

    def write_table(self, table: Any) -> None:
        for row in table.to_pylist():
            self.file.write(json.dumps(row, ensure_ascii=False, allow_nan=False).encode() + b"\n")

    def close(self) -> None:
        """Do nothing: the caller closes the file."""


_WRITERS: dict[str, Callable[[IO[bytes], Any], Any]] = {
    ".csv": pyarrow.csv.CSVWriter,
    ".jsonl": _JsonLines,
    ".parquet": pyarrow.parquet.ParquetWriter,
}


@contextmanager
def new_table(path: Path, columns: ColumnTypes) -> Iterator[Callable[[Iterable[Cells]], None]]:
    """Yield a function that writes rows; the file appears if the block raises no error."""
    check_output(path)
    suffix, temporary = path.suffix.lower(), path.with_name(f".{path.name}.{os.getpid()}.tmp")

    def convert(cell: Any) -> Any:
        return escape_formula(_utf8(cell)) if suffix == ".csv" else _utf8(cell)

    schema = pa.schema([(convert(name), _ARROW[of_type]) for name, of_type in columns.items()])

    def write(rows: Iterable[Cells]) -> None:
        converted = [[*map(convert, row)] for row in rows]
        # By position, since two names may become the same.
        arrays = [pa.array([row[i] for row in converted], f.type) for i, f in enumerate(schema)]
        writer.write_table(pa.Table.from_arrays(arrays, schema=schema))

    try:
        with temporary.open("wb") as file:
            with closing(_WRITERS[suffix](file, schema)) as writer:
                yield write
            flush(file)
        try:
            os.link(temporary, path)  # unlike a rename, it replaces nothing
        except OSError:  # there is a file now, or no link on this file system
            check_output(path)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Raise ValueError if a file exists, has an unknown suffix, or its folder is missing."""
    if path.suffix.lower() not in _WRITERS:
        raise ValueError(
            f"output = {str(path)!r}: expected a name that ends in {', '.join(_WRITERS)}; change it"
        )
    if path.exists():
        raise ValueError(
            f"output = {str(path)!r} is there already, expected a new file; choose another name"
        )
    if not path.parent.is_dir():
        raise ValueError(f"output = {str(path)!r}: found no folder {path.parent}; make it first")


def escape_formula(cell: Any) -> Any:
    """Return a cell, with an apostrophe before a text that a spreadsheet would evaluate."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


def _utf8(cell: Any) -> Any:
    """Escape what UTF-8 cannot encode in a text, such as lone surrogates in names of files."""
    if not isinstance(cell, str):
        return cell
    return cell.encode("utf-8", "backslashreplace").decode("utf-8")


_MAX_PROBLEMS = 20  # unreadable rows with a message; the others are only in the output


@dataclass
class Predicted:
    """The result of `predict`: how many rows there were, and which could not be read."""

    output: Path
    rows: int = 0
    unreadable: int = 0  # number of rows
    problems: list[str] = field(default_factory=list)  # the first few, by row


def predict(
    run: Path | str, data: Path | str, output: Path | str, client: int | None = None,
    model: Path | str | None = None,
) -> Predicted:  # fmt: skip
    """Write a new table with a prediction for each row of a file, or image of a folder.

    The columns of a table are in it, too, such as an id; one that is called as a column of the
    answers is called `input-NAME`. `client` and `model` are as for `result_of`.
    """
    data, output = Path(data).expanduser().absolute(), Path(output).expanduser()
    check_output(output)
    with result_of(run, client, model) as loaded:
        task = task_with(Predicts, loaded.task, "predict")
        needed = {role: name for role, name in task.data.columns if role in task.input_roles}
        rows = read_rows(data, needed)
        by_file = data.is_dir() or data.suffix.lower() in IMAGES
        key: dict[str, type] = {"file": str} if by_file else {"row": int}
        answer = {name: float if name == "probability" else str for name in task.prediction_columns}
        result = Predicted(output)
        encoded = _encoded(rows, task, data)
        answers = key | answer | {"problem": str}
        passed = {} if by_file else read_columns(data)
        columns = key | _renamed(passed, answers) | answer | {"problem": str}
        with new_table(output, columns) as write:
            predicted = _predicted(loaded, task, encoded, result, passed)
            for cells in _batches(predicted, _ROWS_AT_ONCE):
                write(cells)
            _check_readable(data, result)
    return result


def _renamed(passed: ColumnTypes, answers: ColumnTypes) -> dict[str, type]:
    """Return the columns of an input, with other names for those that have an answer's name."""
    renamed: dict[str, type] = {}
    for name, column_type in passed.items():
        new = name
        while new in answers or (new != name and new in passed):
            new = f"input-{new}"
        renamed[new] = column_type
    return renamed


def _check_readable(data: Path, result: Predicted) -> None:
    """Raise ValueError if no row could be read, so that no output appears."""
    if not result.rows:
        raise ValueError(f"data = {str(data)!r}: it has no rows, expected some; name another file")
    if result.unreadable == result.rows:
        raise ValueError(
            f"data = {str(data)!r}: none of its {result.rows} rows can be read, the first since "
            f"{result.problems[0]}; change the file"
        )


def _encoded(
    rows: Iterable[Row], task: Predicts, data: Path
) -> Iterator[tuple[Row, Columns | None]]:
    """Yield rows with their network inputs; None, and a problem, for an unreadable row."""
    folder, shapes = data if data.is_dir() else data.parent, dict[str, tuple[int, ...]]()

    def check_value(role: str, value: Any) -> Any:
        return read_image(value, folder) if role == "image" else task.checked(role, value)

    for row in rows:
        try:
            if row.problem:
                raise UnreadableError(row.problem)
            inputs = task.inputs({role: [check_value(role, x)] for role, x in row.values.items()})
            row_shapes = {name: array.shape for name, array in inputs.items()}
            if (shapes := shapes or row_shapes) != row_shapes:
                problem = f"it becomes {row_shapes}, expected {shapes} as the rows before"
                raise UnreadableError(problem)
        except MemoryError:
            raise
        except UnreadableError as error:
            yield dataclasses.replace(row, problem=str(error)), None
        except Exception as error:  # noqa: BLE001 (readers raise any error for a malformed row)
            yield dataclasses.replace(row, problem=f"{type(error).__name__}: {error}"), None
        else:
            yield row, inputs


def _batches(items: Iterator[_Item], size: int) -> Iterator[list[_Item]]:
    while batch := list(itertools.islice(items, size)):
        yield batch


def _predicted(
    loaded: ModelAndData,
    task: Predicts,
    encoded: Iterator[tuple[Row, Columns | None]],
    result: Predicted,
    passed: ColumnTypes,
) -> Iterator[Cells]:
    """Predict in batches: yield the cells of each row, and count unreadable rows in `result`.

    The input's columns `passed` precede the answers.
    """
    for batch in _batches(encoded, task.evaluation_batch):
        readable = [inputs for _, inputs in batch if inputs is not None]
        answers: Iterator[Cells] = iter(())
        if readable:
            arrays = {name: np.concatenate([row[name] for row in readable]) for name in readable[0]}
            answers = iter(predict_batch(loaded.model, task, arrays, loaded.config.precision))
        for row, inputs in batch:
            result.rows += 1
            cells = (_as(column_type, row.cells.get(name)) for name, column_type in passed.items())
            key = [row.file or row.number, *cells]
            if inputs is not None:
                yield [*key, *next(answers), None]
                continue
            result.unreadable += 1
            if len(result.problems) < _MAX_PROBLEMS:
                result.problems.append(f"{row.name}: {row.problem}")
            yield [*key, *[None] * len(task.prediction_columns), row.problem]


def _as(column_type: type, value: Any) -> str | float | int | None:
    """Return a cell of the input as a text or number; None for none, and for no finite number."""
    if value is None or isinstance(value, str):
        return value
    if column_type is str:
        nested = isinstance(value, dict | list | bool)
        return json.dumps(value, ensure_ascii=False, default=str) if nested else str(value)
    return value if math.isfinite(value) else None
