"""Reject files of examples whose content is far larger than the file.

`datasets` unpacks any packed file, even if its name is `train.csv`; only gzip is accepted here.
A parquet table may store a long text once, and a small number for each row that has it. The
unpacked size is counted in small pieces before a file is read, and only up to the limit.
"""

import csv
import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet
from datasets.utils.extract import Extractor

from ravan_flwr.files import LARGE, check_file, check_unpacked, opened

_CHUNK = 2**20  # bytes that are unpacked at a time
_ROWS = 1024  # of a table at a time


def check_examples(path: Path) -> None:
    """Raise ValueError unless this is a file of examples whose content is not far larger."""
    check_file(path, LARGE)
    archive = Extractor.infer_extractor_format(path)
    if archive == "gzip":
        _check_gzipped(path)
    elif archive is not None:
        raise ValueError(
            f"{path} is packed by {archive}, expected a plain or gzipped file; unpack it, or take "
            "it away"
        )
    elif path.suffix.lower() == ".parquet":
        check_parquet(path)
    elif path.suffix.lower() == ".csv":
        check_csv(path)


def csv_header(lines: Iterator[list[str]], where: str) -> list[str]:
    """Return the names of CSV's columns; ValueError if they are not separated by commas."""
    header = next(lines, [])
    if len(header) == 1 and (mark := next((mark for mark in ";\t" if mark in header[0]), "")):
        raise ValueError(f"{where}: separated by {mark!r}, expected ','; save it with commas")
    if twice := sorted({name for name in header if header.count(name) > 1}):
        raise ValueError(
            f"{where}: its first line has {twice} more than once, expected each "
            "column's name once; rename one"
        )
    return header


def check_csv(path: Path) -> None:
    """Raise ValueError for CSV that pandas cannot read, or where more fields make an index."""
    with path.open(encoding="utf-8-sig", newline="") as file:
        lines = csv.reader(file)
        try:
            header = csv_header(lines, str(path))
            # pandas ignores blank lines.
            fields = next((row for row in lines if len(row) > 1 or "".join(row).strip()), [])
            while file.read(_CHUNK):
                pass
        except UnicodeDecodeError:
            raise ValueError(
                f"{path}: its text is no UTF-8, expected UTF-8 throughout; save it as UTF-8"
            ) from None
        except csv.Error:
            return  # reported when the whole file is read
    if len(fields) > len(header):
        raise ValueError(
            f"{path}: its first row has {len(fields)} fields, expected {len(header)} as in the "
            "header; put texts with commas in quotation marks"
        )


def _check_gzipped(path: Path) -> None:
    packed, unpacked = path.stat().st_size, 0
    try:
        with gzip.open(path) as file:
            while chunk := file.read(_CHUNK):
                unpacked += len(chunk)
                check_unpacked(path, packed, unpacked)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{path} cannot be unpacked ({error}); restore it") from None


def check_parquet(path: Path) -> None:
    """Raise ValueError if a table is far larger than its file; ignore an invalid file."""
    try:
        with opened(path, LARGE) as file:
            _check_table(path, path.stat().st_size, pyarrow.parquet.ParquetFile(file).metadata)
    except (pa.ArrowException, OSError):
        return  # reported when the file is read


def _check_table(path: Path, packed: int, metadata: Any) -> None:
    encoded_bytes, dictionary_columns = 0, set()
    for group in range(metadata.num_row_groups):
        row_group = metadata.row_group(group)
        for number in range(row_group.num_columns):
            column = row_group.column(number)
            encoded_bytes += max(
                column.total_uncompressed_size, _MIN_VALUE_BYTES * column.num_values
            )
            if column.has_dictionary_page and column.physical_type.endswith("BYTE_ARRAY"):
                dictionary_columns.add(column.path_in_schema)
    check_unpacked(path, packed, encoded_bytes)
    if not dictionary_columns:
        return
    with opened(path, LARGE) as file:
        table = pyarrow.parquet.ParquetFile(file, read_dictionary=sorted(dictionary_columns))
        unpacked = 0
        for batch in table.iter_batches(_ROWS, columns=sorted(dictionary_columns)):
            unpacked += sum(map(_expanded_bytes, batch.columns))
            check_unpacked(path, packed, unpacked)


_MIN_VALUE_BYTES = 4  # of a value in memory


def _expanded_bytes(values: Any) -> int:
    """Return the bytes of dictionary-encoded texts if each use had its own copy."""
    if pa.types.is_dictionary(values.type):
        lengths = pc.binary_length(values.dictionary).cast(pa.int64())
        return pc.sum(lengths.take(values.indices)).as_py() or 0
    if pa.types.is_struct(values.type):
        return sum(map(_expanded_bytes, values.flatten()))
    return _expanded_bytes(values.flatten()) if pa.types.is_nested(values.type) else 0
