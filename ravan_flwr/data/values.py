"""Check the values of one row: a text must be one, an image must open."""

import io
from pathlib import Path
from typing import Any

from PIL import Image, ImageOps, UnidentifiedImageError

from ravan_flwr.data.rows import UnreadableError


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
    """Open an image whole: a path (a relative one starts at `folder`), or its bytes."""
    if isinstance(value, dict):  # as `datasets` writes one to parquet
        value = value.get("bytes") or value.get("path")
    if not value:
        raise UnreadableError("its image is missing")
    if isinstance(value, bytes):
        return _opened(io.BytesIO(value))
    if not isinstance(value, str | Path):
        raise UnreadableError(f"its image is a {type(value).__name__}, expected a path or bytes")
    if not (folder / value).is_file():
        raise UnreadableError(f"there is no file {str(value)!r}")
    return _opened(folder / value)


def _opened(source: Any) -> Image.Image:
    """Read a file's image whole, turned as its camera was held."""
    try:
        with Image.open(source) as image:
            image.load()
            check_bits(image.mode, "it")
            return ImageOps.exif_transpose(image)
    except UnidentifiedImageError:
        raise UnreadableError("it is no image") from None
    except MemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (Pillow's readers raise what they like)
        raise UnreadableError(f"its image cannot be read: {error}") from None
