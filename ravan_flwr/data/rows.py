"""Read examples without labels row by row, from files of any length, in the memory of a few rows.

CSV, JSON lines (an object a line) and parquet have the columns by name; a folder of images has a
row for each image. A row that cannot be read says why; those after it are read all the same,
but for a field of CSV without an end.
A value of a row is checked as well: a text must be one, an image must open.
"""

import csv
import io
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, AnyStr, cast

import pyarrow as pa
import pyarrow.parquet
from PIL import Image, ImageOps, UnidentifiedImageError

from ravan_flwr.data.packed import check_parquet
from ravan_flwr.files import check_file

IMAGES = (".png", ".jpg", ".jpeg", ".bmp", ".webp", ".tif", ".tiff", ".gif")
_AT_A_TIME = 256  # rows of a parquet file
_LONGEST = 2**24  # characters of a line, or bytes: a text may be long


class UnreadableError(Exception):
    """Say what is wrong with one row, or with one value of it."""


@dataclass(frozen=True)
class Row:
    """Hold the values of one example by role, or why there are none."""

    number: int  # of the first row: 1
    values: Mapping[str, Any]
    problem: str = ""
    file: str = ""  # of an image in a folder, below that folder

    @property
    def name(self) -> str:
        """Call it what its reader does."""
        return self.file or f"row {self.number}"


def rows_of(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the rows of a file, or the images of a folder; `columns` are the needed ones by role.

    A column may have the name of its role in place of its own. Raise ValueError at once for what
    is no table with these columns.
    """
    if not path.exists():
        raise ValueError(f"data = {str(path)!r}: found nothing there; correct the path")
    if not path.is_dir():
        check_file(path, sys.maxsize)
    kind = path.suffix.lower()
    if path.is_dir() or kind in IMAGES:
        rows = _images(path, columns)
    elif kind in _TABLES:
        rows = _TABLES[kind](path, columns)
    else:
        raise ValueError(
            f"data = {str(path)!r}: got a file of kind {kind!r}, expected {', '.join(_TABLES)}, an "
            "image or a folder of images; give the file the ending that says what is in it"
        )
    next(rows)
    return cast(Iterator[Row], rows)


# Each of these yields None once it knows that there are such columns, then the rows.
Rows = Iterator[Row | None]


def _images(path: Path, columns: Mapping[str, str]) -> Rows:
    """Find the images of a folder, in the order of their names, or the one."""
    if set(columns) != {"image"}:
        raise ValueError(
            f"data = {str(path)!r}: got {'a folder' if path.is_dir() else 'an image'}, expected a "
            f"file of texts with the columns {_listed(columns.values())}: {', '.join(_TABLES)}; "
            "name one"
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
    """Find the images of a folder, but for hidden ones; or the one that it is."""
    if not path.is_dir():
        yield path
    for parent, folders, files in os.walk(path):
        folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
        for name in sorted(files):
            if name.lower().endswith(IMAGES) and not name.startswith("."):
                yield Path(parent, name)


def _csv(path: Path, columns: Mapping[str, str]) -> Rows:
    # What is no UTF-8 becomes halves of characters, which are found value by value.
    with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
        lines = _fields(path, file)
        header = next(lines, [])
        names = match_columns(header, columns, f"data = {str(path)!r}")
        places = {role: header.index(name) for role, name in names.items()}
        yield None
        for number, fields in enumerate(filter(None, lines), start=1):  # no empty ones
            if len(fields) == len(header):
                yield Row(number, {role: fields[place] for role, place in places.items()})
            else:
                reason = f"it has {len(fields)} fields, expected {len(header)} as in the first line"
                yield Row(number, {}, reason)


def _fields(path: Path, file: IO[str]) -> Iterator[list[str]]:
    """Read the fields of each line of CSV; other readers of the process keep their own limit."""
    lines = csv.reader(_lines(path, file))
    while True:
        before = csv.field_size_limit(_LONGEST)
        try:
            fields = next(lines)
        except StopIteration:
            return
        except csv.Error as error:
            raise ValueError(
                f"data = {str(path)!r}: line {lines.line_num} is no CSV ({error}), expected "
                f"fields of {_LONGEST:,} characters at most; correct it"
            ) from None
        finally:
            csv.field_size_limit(before)
        yield fields


def _lines(path: Path, file: IO[AnyStr]) -> Iterator[AnyStr]:
    """Read the lines of a file; ValueError for one that has no end."""
    while line := file.readline(_LONGEST):
        if len(line) == _LONGEST:
            raise ValueError(
                f"data = {str(path)!r}: it has a line of {_LONGEST:,} characters or more, expected "
                "shorter ones; correct it"
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
                yield Row(number, {}, str(error))
                continue
            yield Row(number, {role: content[name] for role, name in names.items()})


def _parquet(path: Path, columns: Mapping[str, str]) -> Rows:
    check_parquet(path)
    try:
        file = pyarrow.parquet.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(
            f"data = {str(path)!r}: it cannot be read as parquet ({error}); restore it"
        ) from None
    names = match_columns(file.schema_arrow.names, columns, f"data = {str(path)!r}")
    number = 0
    yield None
    with file:
        try:
            for batch in file.iter_batches(_AT_A_TIME, columns=list(names.values())):
                for values in batch.to_pylist():
                    number += 1
                    yield Row(number, {role: values[name] for role, name in names.items()})
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


def match_columns(header: Sequence[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """Find the columns of a table: role -> name, which may be the role; ValueError without one."""
    names = {}
    for role, column in columns.items():
        name = next((name for name in (column, role) if name in header), None)
        if name is None:
            raise ValueError(
                f"{where}: got the columns {_listed(header)}, expected {column!r}"
                + (f" or {role!r}" if role != column else "")
                + " among them; rename one"
            )
        names[role] = name
    return names


def _listed(names: Collection[str]) -> str:
    shown = [repr(str(name)[:60]) for name in [*names][:20]]
    return (", ".join(shown) or "(none)") + (", ..." if len(names) > 20 else "")


# The others of Pillow are rarely used for examples; that of EPS starts the program `gs`.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
MOST_PIXELS = 2**26  # 8192 x 8192
MOST_STRETCHED = 256  # times that one side is the other: a processor may scale the shorter one up


def check_bits(mode: str, what: str) -> None:
    """Refuse an image of more than 8 bits a channel: Pillow would make it black and white."""
    if mode.startswith(("I", "F")):
        raise ValueError(
            f"{what} has more than 8 bits a channel (mode {mode}), expected 8; convert it first"
        )


def text_of(role: str, value: Any) -> str:
    """Return a text; raise UnreadableError for anything else, and for one without a letter."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnreadableError(f"its {role} is missing")
    if not isinstance(value, str):
        raise UnreadableError(f"its {role} is a {type(value).__name__}, expected a text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise UnreadableError(f"its {role} is no UTF-8")
    return value


def image_of(value: Any, folder: Path) -> Image.Image:
    """Read an image whole, turned as its camera was held; `value` is as for `opened_image`."""
    try:
        with opened_image(value, folder) as image:
            image.load()
            check_bits(image.mode, "it")
            return ImageOps.exif_transpose(image)
    except (UnreadableError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableError(f"it is no image of a kind that is read: {_KINDS}") from None
    except Exception as error:  # noqa: BLE001 (Pillow's readers raise what they like)
        raise UnreadableError(f"its image cannot be read: {error}") from None


_KINDS = ", ".join(FORMATS)


@contextmanager
def opened_image(value: Any, folder: Path) -> Iterator[Image.Image]:
    """Open an image, of which only the header is read: a path (a relative one starts at `folder`).

    It may also be the bytes of a file, or have either, as `datasets` writes one to parquet.
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
        if width * height > MOST_PIXELS or max(image.size) > MOST_STRETCHED * min(image.size):
            raise UnreadableError(
                f"its image has {width:,} x {height:,} pixels, expected {MOST_PIXELS:,} at most, "
                f"and no side more than {MOST_STRETCHED} times the other"
            )
        yield image
