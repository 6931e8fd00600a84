"""Read examples without labels row by row, from files of any length, in the memory of a few rows.

CSV, JSON lines (one object per line) and parquet have named columns; a folder of images has a row
for each image. An unreadable row is returned with the reason. Later rows are still read, except
after a CSV field with misplaced quotation marks, whose end is not certain.
Values are checked too: a text must be a string, and an image must open.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, AnyStr, cast

import pyarrow as pa
import pyarrow.parquet
from PIL import Image, ImageOps, UnidentifiedImageError

from ravan_flwr.data.packed import check_parquet, csv_header
from ravan_flwr.files import check_file

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")
_BATCH = 256  # rows of a parquet file that are read at a time
_LONGEST = 2**24  # characters or bytes of a line: a text may be long


class UnreadableError(Exception):
    """The reason why a row, or one of its values, cannot be used."""


@dataclass(frozen=True)
class Row:
    """The values of one example by role, or the reason why it has none."""

    number: int  # counted from 1
    values: Mapping[str, Any]
    problem: str = ""
    file: str = ""  # of an image, relative to the folder of images
    cells: Mapping[str, Any] = field(default_factory=dict)  # of the table, by column

    @property
    def name(self) -> str:
        """Return the name of the row for messages."""
        return self.file or f"row {self.number}"


def read_rows(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the rows of a file, or the images of a folder; `columns` has the needed ones by role.

    A column may have its role as name instead. Raise ValueError immediately, not at the first row,
    if the file is no table with these columns.
    """
    if not path.exists():
        raise ValueError(f"data = {str(path)!r}: found nothing there; correct the path")
    if not path.is_dir():
        check_file(path, sys.maxsize)
    suffix = path.suffix.lower()
    if path.is_dir() or suffix in IMAGES:
        rows = _images(path, columns)
    elif suffix in _TABLES:
        rows = _TABLES[suffix](path, columns)
    else:
        raise ValueError(
            f"data = {str(path)!r}: got a file of kind {suffix!r}, expected {', '.join(_TABLES)}, "
            "an image or a folder of images; give the file the suffix of its format"
        )
    next(rows)
    return cast(Iterator[Row], rows)


# A reader first yields None, after it has checked the columns, then the rows.
Rows = Iterator[Row | None]


def _images(path: Path, columns: Mapping[str, str]) -> Rows:
    """Yield a row for each image of a folder, sorted by name, or for a single image."""
    if set(columns) != {"image"}:
        raise ValueError(
            f"data = {str(path)!r}: got {'a folder' if path.is_dir() else 'an image'}, expected a "
            f"file of texts with the columns {quoted(columns.values())}: {', '.join(_TABLES)}; "
            "give the path of such a file"
        )
    number, root = 0, path if path.is_dir() else path.parent
    for number, image in enumerate(_images_below(path), start=1):
        if number == 1:
            yield None
        yield Row(number, {"image": image}, file=str(image.relative_to(root)))
    if not number:
        raise ValueError(
            f"data = {str(path)!r}: found no image in this folder, expected files such as "
            f"{', '.join(IMAGES[:3])}; name another"
        )


def _images_below(path: Path) -> Iterator[Path]:
    """Yield the images of a folder and its subfolders, without hidden ones, or a single image."""
    if not path.is_dir():
        yield path
    for parent, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(files):
            if name.lower().endswith(IMAGES) and not name.startswith("."):
                yield Path(parent, name)


def _csv(path: Path, columns: Mapping[str, str]) -> Rows:
    # Bytes that are not UTF-8 become surrogates, which `check_text` finds in each value.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _fields(path, file)
        header = csv_header(lines, f"data = {str(path)!r}")
        names = match_columns(header, columns, f"data = {str(path)!r}")
        indices = {role: header.index(name) for role, name in names.items()}
        yield None
        for number, fields in enumerate(filter(None, lines), start=1):  # without empty lines
            if len(fields) == len(header):
                cells = dict(zip(header, fields, strict=True))
                values = {role: fields[index] for role, index in indices.items()}
                yield Row(number, values, cells=cells)
            else:
                reason = f"it has {len(fields)} fields, expected {len(header)} as in the first line"
                yield Row(number, {}, reason)


def _fields(path: Path, file: IO[str]) -> Iterator[list[str]]:
    """Yield the fields of each line of CSV; the field limit of other readers is kept."""
    lines = csv.reader(_lines(path, file), strict=True)  # an open quotation mark is an error
    while True:
        before = csv.field_size_limit(_LONGEST)
        try:
            fields = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"data = {str(path)!r}: line {lines.line_num} is no CSV ({error}), expected "
                f"fields of {_LONGEST:,} characters at most, and quotation marks around whole "
                "fields, doubled within them; correct the line"
            ) from None
        finally:
            csv.field_size_limit(before)
        yield fields


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Yield the lines of a file; ValueError for an overlong line."""
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise ValueError(
                f"data = {str(path)!r}: it has a line of {_LONGEST:,} characters or more, expected "
                "shorter ones; break the line"
            )
        yield line


def _json_lines(path: Path, columns: Mapping[str, str]) -> Rows:
    with path.open("rb") as file:
        if file.read(4096).lstrip().startswith(b"["):
            raise ValueError(
                f"data = {str(path)!r}: it begins with '[', expected JSON lines: an object a line, "
                "without brackets around them; write it so"
            )
        yield None
        file.seek(0)
        for number, line in enumerate(filter(bytes.strip, _lines(path, file)), start=1):
            try:
                content = json.loads(line)
            except (ValueError, RecursionError) as error:
                yield Row(number, {}, f"it is no JSON: {error}")
                continue
            if not isinstance(content, dict):
                yield Row(number, {}, "it is no JSON object")
                continue
            try:
                names = match_columns(list(content), columns, "it")
            except ValueError as error:
                yield Row(number, {}, str(error), cells=content)
                continue
            values = {role: content[name] for role, name in names.items()}
            yield Row(number, values, cells=content)


def _parquet(path: Path, columns: Mapping[str, str]) -> Rows:
    check_parquet(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"data = {str(path)!r}: it cannot be read as parquet ({error}); restore it"
        ) from None
    names = match_columns(file.schema_arrow.names, columns, f"data = {str(path)!r}")
    number, read = 0, list(names.values() | _plain_columns(file.schema_arrow).keys())
    yield None
    with file:
        try:
            for batch in file.iter_batches(_BATCH, columns=read):
                for cells in batch.to_pylist():
                    number += 1
                    values = {role: cells[name] for role, name in names.items()}
                    yield Row(number, values, cells=cells)
        except (pa.ArrowException, OSError) as error:
            raise ValueError(
                f"data = {str(path)!r}: it cannot be read after row {number} ({error}); restore it"
            ) from None


_TABLES: dict[str, Callable[[Path, Mapping[str, str]], Rows]] = {
    ".csv": _csv,
    ".jsonl": _json_lines,
    ".json": _json_lines,
    ".parquet": _parquet,
}


def read_columns(path: Path) -> dict[str, type]:
    """Return the columns of a table that `read_rows` reads, with the type of their values.

    A column of JSON lines is one that any object has, so the whole file is read. Images, bytes and
    nested values of parquet are left out.
    """
    if path.suffix.lower() == ".parquet":
        with pyarrow.parquet.ParquetFile(path) as file:
            return _plain_columns(file.schema_arrow)
    if path.suffix.lower() == ".csv":
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            return dict.fromkeys(next(_fields(path, file), []), str)
    rows = (row.cells for row in _TABLES[".jsonl"](path, {}) if row is not None)
    return dict.fromkeys((name for cells in rows for name in cells), str)


def _plain_columns(schema: pa.Schema) -> dict[str, type]:
    """Return the columns of texts, numbers and times, with the type that holds their values."""
    types, columns = pa.types, dict[str, type]()
    of_no_cell = (
        types.is_nested, types.is_binary, types.is_large_binary, types.is_fixed_size_binary
    )  # fmt: skip
    for name, arrow_type in zip(schema.names, schema.types, strict=True):
        if types.is_integer(arrow_type) and arrow_type != pa.uint64():  # which no int64 holds
            columns[name] = int
        elif types.is_floating(arrow_type):
            columns[name] = float
        elif not any(test(arrow_type) for test in of_no_cell):
            columns[name] = str
    return columns


def match_columns(header: Sequence[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the name of each role's column in a table; ValueError if a column is missing.

    The name is the one in `columns`, or the role itself.
    """
    names = {}
    for role, column in columns.items():
        name = next((name for name in (column, role) if name in header), None)
        if name is None:
            if "image" in header and "image" not in columns:
                raise ValueError(
                    f"{where}: your data are images, but this preset's model reads texts; choose a "
                    "preset of a model that reads images, or other data"
                )
            raise ValueError(
                f"{where}: got the columns {quoted(header)}, expected {column!r}"
                + (f" or {role!r}" if role != column else "")
                + " among them; rename one"
            )
        names[role] = name
    return names


def list_some(names: Sequence[object], max_shown: int = 20) -> str:
    """Return the first names or numbers as text."""
    return ", ".join(map(str, names[:max_shown])) + (", ..." if len(names) > max_shown else "")


def quoted(names: Collection[str]) -> str:
    """Return the first twenty names in quotation marks, shortened."""
    return list_some([repr(str(name)[:60]) for name in names]) or "(none)"


# Pillow's other formats are rarely used for examples; its EPS reader starts the program `gs`.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
MAX_PIXELS = 2**26  # 8192 x 8192
MAX_ASPECT = 256  # ratio of the sides: an image processor may scale the shorter one up


def check_bits(mode: str, subject: str) -> None:
    """Raise ValueError for an image of more than 8 bits a channel.

    Pillow would turn it black and white. `subject` begins the message.
    """
    if mode.startswith(("I", "F")):
        raise ValueError(
            f"{subject} has more than 8 bits a channel (mode {mode}), expected 8; convert it first"
        )


def check_text(role: str, value: Any) -> str:
    """Return a text; raise UnreadableError for any other value, and for a blank text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnreadableError(f"its {role} is missing")
    if not isinstance(value, str):
        raise UnreadableError(f"its {role} is a {type(value).__name__}, expected a text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise UnreadableError(f"its {role} is no UTF-8")
    return value


def read_image(value: Any, folder: Path) -> Image.Image:
    """Return an image, rotated by its EXIF orientation; `value` is as for `opened_image`."""
    try:
        with opened_image(value, folder) as image:
            image.load()
            check_bits(image.mode, "it")
            return ImageOps.exif_transpose(image)
    except (UnreadableError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableError(f"it is no image of a kind that is read: {_FORMATS}") from None
    except Exception as error:  # noqa: BLE001 (Pillow's readers may raise any exception)
        raise UnreadableError(f"its image cannot be read: {error}") from None


_FORMATS = ", ".join(FORMATS)


@contextmanager
def opened_image(value: Any, folder: Path) -> Iterator[Image.Image]:
    """Open an image and read its header only; raise UnreadableError if it is too large.

    `value` is a path (relative to `folder`), the bytes of a file, or a mapping with `bytes` or
    `path`, as `datasets` writes images to parquet.
    """
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if not value:
        raise UnreadableError("its image is missing")
    if not isinstance(value, str | Path | bytes):
        raise UnreadableError(f"its image is a {type(value).__name__}, expected a path or bytes")
    if not isinstance(value, bytes) and not (folder / value).is_file():
        raise UnreadableError(f"there is no file {str(value)!r}")
    source = io.BytesIO(value) if isinstance(value, bytes) else folder / value
    with Image.open(source, formats=FORMATS) as image:
        width, height = image.size
        if width * height > MAX_PIXELS or max(image.size) > MAX_ASPECT * min(image.size):
            raise UnreadableError(
                f"its image has {width:,} x {height:,} pixels, expected {MAX_PIXELS:,} at most, "
                f"and no side more than {MAX_ASPECT} times the other"
            )
        yield image
