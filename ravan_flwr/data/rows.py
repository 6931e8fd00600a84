"""Read examples without labels row by row, from files of any length, in the memory of a few rows.

CSV, JSON lines and parquet have named columns; a folder of images has a row for each image. Values
are checked one by one: a text must be a string, and an image must open.
"""

import io
import itertools
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
from PIL import Image, ImageOps, UnidentifiedImageError

from ravan_flwr.data.hub import IMAGES, TABLES, check_encoding, every_split

_BATCH = 256  # rows that are read at a time


class UnreadableError(Exception):
    """The reason why a row, or one of its values, cannot be used."""


@dataclass(frozen=True)
class Row:
    """The values of one example by role, or the reason why it has none."""

    number: int  # counted from 1
    values: Mapping[str, Any]
    problem: str = ""
    file: str = ""  # of an image, relative to the folder of images

    @property
    def name(self) -> str:
        """Return the name of the row for messages."""
        return self.file or f"row {self.number}"


def rows_of(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Read the rows of a file, or the images of a folder; `columns` has the needed ones by role.

    A column may have its role as name instead. Raise ValueError immediately, not at the first row,
    if the file is no table with these columns.
    """
    if not path.exists():
        raise ValueError(f"data = {str(path)!r}: found nothing there; correct the path")
    if path.is_dir() or path.suffix.lower() in IMAGES:
        return _images(path, columns)
    where = f"data = {str(path)!r}"
    examples = every_split(str(path), "", "", foreign=True)["train"]
    check_encoding(examples, where)
    return _rows(examples, match_columns(examples.column_names, columns, where))


def _rows(examples: datasets.Dataset, names: Mapping[str, str]) -> Iterator[Row]:
    number = 0
    for batch in examples.iter(_BATCH):
        for values in zip(*(batch[name] for name in names.values()), strict=True):
            number += 1
            yield Row(number, dict(zip(names, values, strict=True)))


def _images(path: Path, columns: Mapping[str, str]) -> Iterator[Row]:
    """Return a row for each image of a folder, sorted by name, or for a single image."""
    if set(columns) != {"image"}:
        raise ValueError(
            f"data = {str(path)!r}: got {'a folder' if path.is_dir() else 'an image'}, expected a "
            f"file of texts with the columns {_listed(columns.values())}: {', '.join(TABLES)}; "
            "name one"
        )
    root, images = path if path.is_dir() else path.parent, _images_below(path)
    if (first := next(images, None)) is None:
        raise ValueError(
            f"data = {str(path)!r}: found no image in this folder, expected files such as "
            f"{', '.join(IMAGES[:3])}; name another"
        )
    return (
        Row(number, {"image": image}, file=str(image.relative_to(root)))
        for number, image in enumerate(itertools.chain([first], images), start=1)
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


def match_columns(header: Sequence[str], columns: Mapping[str, str], where: str) -> dict[str, str]:
    """Return the name of each role's column in a table; ValueError if a column is missing.

    The name is the one in `columns`, or the role itself.
    """
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


# Pillow's other formats are rarely used for examples; its EPS reader starts the program `gs`.
FORMATS = ("PNG", "JPEG", "BMP", "WEBP", "TIFF", "GIF")
MOST_PIXELS = 2**26  # 8192 x 8192
MOST_ASPECT = 256  # ratio of the sides: an image processor may scale the shorter one up


def check_bits(mode: str, subject: str) -> None:
    """Raise ValueError for an image of more than 8 bits a channel.

    Pillow would turn it black and white. `subject` begins the message.
    """
    if mode.startswith(("I", "F")):
        raise ValueError(
            f"{subject} has more than 8 bits a channel (mode {mode}), expected 8; convert it first"
        )


def text_of(role: str, value: Any) -> str:
    """Return a text; raise UnreadableError for any other value, and for a blank text."""
    if value is None or (isinstance(value, str) and not value.strip()):
        raise UnreadableError(f"its {role} is missing")
    if not isinstance(value, str):
        raise UnreadableError(f"its {role} is a {type(value).__name__}, expected a text")
    if any("\ud800" <= char <= "\udfff" for char in value):
        raise UnreadableError(f"its {role} is no UTF-8")
    return value


def image_of(value: Any, folder: Path) -> Image.Image:
    """Return an image, rotated by its EXIF orientation; `value` is as for `opened_image`."""
    try:
        with opened_image(value, folder) as image:
            image.load()
            check_bits(image.mode, "it")
            return ImageOps.exif_transpose(image)
    except (UnreadableError, MemoryError):
        raise
    except UnidentifiedImageError:
        raise UnreadableError(f"it is no image of a kind that is read: {_KINDS}") from None
    except Exception as error:  # noqa: BLE001 (Pillow's readers may raise any exception)
        raise UnreadableError(f"its image cannot be read: {error}") from None


_KINDS = ", ".join(FORMATS)


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
        if width * height > MOST_PIXELS or max(image.size) > MOST_ASPECT * min(image.size):
            raise UnreadableError(
                f"its image has {width:,} x {height:,} pixels, expected {MOST_PIXELS:,} at most, "
                f"and no side more than {MOST_ASPECT} times the other"
            )
        yield image
