"""Write a table to a new file, row by row: CSV, JSON lines or parquet, by the ending of its name.

The file appears whole or not at all, and never in the place of another.
"""

import csv
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Protocol

import pyarrow as pa
import pyarrow.parquet

Cells = Sequence[str | float | int | None]
Kinds = Mapping[str, type]  # of the columns, by name: str, int or float

_FORMULA = ("=", "+", "-", "@", "\t", "\r")  # what a formula begins with
_NUMBER = re.compile(r"[-+]?\d+(\.\d+)?")

_ROWS_AT_ONCE = 8192  # of a parquet file: small groups of rows make it large and slow


class Sink(Protocol):
    """Take rows until it is closed."""

    def __init__(self, path: Path, kinds: Kinds) -> None: ...

    def write(self, cells: Cells) -> None:
        """Take a row."""

    def close(self) -> None:
        """Write what is left, to disk."""


@contextmanager
def new_table(path: Path, kinds: Kinds) -> Iterator[Sink]:
    """Open a new file for rows; it has its name once the block ends well."""
    check_new(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    sink = _SINKS[path.suffix.lower()](temporary, kinds)
    try:
        try:
            yield sink
        finally:
            sink.close()
        try:
            os.link(temporary, path)  # unlike a rename, it replaces nothing
        except OSError:  # there is a file now, or no link on this file system
            check_new(path)
            temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)


def check_new(path: Path) -> None:
    """Refuse a file that is there, of an unknown kind, or in no folder."""
    if path.suffix.lower() not in _SINKS:
        raise ValueError(
            f"output = {str(path)!r}: expected a name that ends in {', '.join(_SINKS)}; change it"
        )
    if path.exists():
        raise ValueError(f"output = {str(path)!r} is there already, expected a new file; name one")
    if not path.parent.is_dir():
        raise ValueError(f"output = {str(path)!r}: found no folder {path.parent}; make it first")


class _Csv:
    def __init__(self, path: Path, kinds: Kinds) -> None:
        self.file = path.open("w", encoding="utf-8", newline="")
        self.table = csv.writer(self.file)
        self.table.writerow(kinds)

    def write(self, cells: Cells) -> None:
        self.table.writerow(map(no_formula, map(_utf8, cells)))

    def close(self) -> None:
        _close(self.file)


def no_formula(cell: Any) -> Any:
    """Put an apostrophe before a text that a spreadsheet would compute; numbers stay."""
    if not isinstance(cell, str) or not cell.startswith(_FORMULA) or _NUMBER.fullmatch(cell):
        return cell
    return f"'{cell}"


class _JsonLines:
    def __init__(self, path: Path, kinds: Kinds) -> None:
        self.file, self.names = path.open("w", encoding="utf-8"), [*kinds]

    def write(self, cells: Cells) -> None:
        content = dict(zip(self.names, map(_utf8, cells), strict=True))
        self.file.write(json.dumps(content, ensure_ascii=False, allow_nan=False) + "\n")

    def close(self) -> None:
        _close(self.file)


class _Parquet:
    def __init__(self, path: Path, kinds: Kinds) -> None:
        self.schema = pa.schema([(name, _ARROW[kind]) for name, kind in kinds.items()])
        self.file = path.open("wb")
        self.table = pyarrow.parquet.ParquetWriter(self.file, self.schema)
        self.rows: list[Cells] = []

    def write(self, cells: Cells) -> None:
        self.rows.append([_utf8(cell) for cell in cells])
        if len(self.rows) >= _ROWS_AT_ONCE:
            self._flush()

    def _flush(self) -> None:
        columns = zip(*self.rows, strict=True)
        arrays = [pa.array(c, f.type) for c, f in zip(columns, self.schema, strict=True)]
        self.table.write_table(pa.Table.from_arrays(arrays, schema=self.schema))
        self.rows = []

    def close(self) -> None:
        if self.rows:
            self._flush()
        self.table.close()
        _close(self.file)


_ARROW = {str: pa.string(), int: pa.int64(), float: pa.float64()}
_SINKS: dict[str, type[Sink]] = {".csv": _Csv, ".jsonl": _JsonLines, ".parquet": _Parquet}


def _utf8(cell: Any) -> Any:
    """Make a text one that UTF-8 can hold: names of files may be none."""
    if not isinstance(cell, str):
        return cell
    return cell.encode("utf-8", "backslashreplace").decode("utf-8")


def _close(file: IO[Any]) -> None:
    file.flush()
    os.fsync(file.fileno())
    file.close()
