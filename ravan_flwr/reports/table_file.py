"""Write a table to a new file, row by row: CSV, JSON lines or parquet, by the ending of its name.

The file appears whole or not at all, and never in the place of another.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

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

    def __init__(self, writer: Any, schema: Any, clean: Callable[[Any], Any]) -> None:
        self._writer, self._schema, self._clean = writer, schema, clean
        self._rows: list[Cells] = []

    def write(self, cells: Cells) -> None:
        """Take a row."""
        self._rows.append([self._clean(cell) for cell in cells])
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
                rows = Rows(writer, schema, _for_spreadsheets if kind == ".csv" else _utf8)
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


def _for_spreadsheets(cell: Any) -> Any:
    return no_formula(_utf8(cell))


def _utf8(cell: Any) -> Any:
    """Make a text one that UTF-8 can hold: names of files may be none."""
    if not isinstance(cell, str):
        return cell
    return cell.encode("utf-8", "backslashreplace").decode("utf-8")
