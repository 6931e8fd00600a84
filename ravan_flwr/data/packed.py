"""Refuse files of examples that become far larger than they are when they are read.

`datasets` unpacks whatever is packed, be its name `train.csv`: gzip is taken, nothing else. A table
in parquet holds a long text once and a small number for each row that has it. What a file would
become is counted before it is read, a little at a time, and no longer than until it is too much.
"""

import csv
import gzip
import zlib
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from datasets.utils.extract import Extractor

from ravan_flwr.files import LARGE, check_file, check_unpacked, opened

_AT_A_TIME = 2**20  # bytes
_ROWS = 1024


def check_examples(path: Path) -> None:
    """Raise ValueError if a file of examples is none, or becomes far larger when it is read."""
    check_file(path, LARGE)
    kind = Extractor.infer_extractor_format(path)
    if kind == "gzip":
        _check_gzipped(path)
    elif kind is not None:
        raise ValueError(
            f"{path} is packed by {kind}, expected a plain or gzipped file; unpack it, or take it "
            "away"
        )
    elif path.suffix.lower() == ".parquet":
        check_parquet(path)
    elif path.suffix.lower() == ".csv":
        check_header(path)


def check_header(path: Path) -> None:
    """Raise ValueError for CSV with more fields than names: pandas takes the first for an index."""
    with path.open(encoding="utf-8-sig", errors="replace", newline="") as file:
        lines = csv.reader(file)
        try:
            header, fields = next(lines, []), next(lines, [])
        except csv.Error:
            return  # whoever reads all of it says so
    if len(fields) > len(header):
        raise ValueError(
            f"{path}: its first row has {len(fields)} fields, expected {len(header)} as in the "
            "header; put texts with commas in quotation marks"
        )


def _check_gzipped(path: Path) -> None:
    packed, unpacked = path.stat().st_size, 0
    try:
        with gzip.open(path) as file:
            while part := file.read(_AT_A_TIME):
                unpacked += len(part)
                check_unpacked(path, packed, unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); restore it") from None


def check_parquet(path: Path) -> None:
    """Raise ValueError if a table becomes far larger than its file; one that is none is left."""
    try:
        with opened(path, LARGE) as file:
            _check_table(path, path.stat().st_size, pyarrow.parquet.ParquetFile(file).metadata)
    except (pa.ArrowException, OSError):
        return  # whoever reads it says what is wrong with it


def _check_table(path: Path, packed: int, metadata: Any) -> None:
    fixed, shared = 0, set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            fixed += max(column.total_uncompressed_size, _WIDTH * column.num_values)
            if column.has_dictionary_page and column.physical_type.endswith("BYTE_ARRAY"):
                shared.add(column.path_in_schema)
    check_unpacked(path, packed, fixed)
    if not shared:
        return
    with opened(path, LARGE) as file:
        table = pyarrow.parquet.ParquetFile(file, read_dictionary=sorted(shared))
        unpacked = 0
        for batch in table.iter_batches(_ROWS, columns=sorted(shared)):
            unpacked += sum(map(_written_out, batch.columns))
            check_unpacked(path, packed, unpacked)


_WIDTH = 4  # bytes of a value in memory, at least


def _written_out(values: Any) -> int:
    """Count the bytes of texts that are held once, with each written as often as it is used."""
    if pa.types.is_dictionary(values.type):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(values.indices)).as_py() or 0
    if pa.types.is_struct(values.type):
        return sum(map(_written_out, values.flatten()))
    return _written_out(values.flatten()) if pa.types.is_nested(values.type) else 0
