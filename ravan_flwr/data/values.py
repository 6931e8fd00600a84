"""Check the values of one row: a text must be one, an image must open."""

import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from ravan_flwr.data.rows import UnreadableError

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
