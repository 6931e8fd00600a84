"""Read single fields of a preset's file, with errors that name them."""

from collections.abc import Mapping, Set
from typing import Any

from ravan_flwr.config.key import did_you_mean


def text_field(where: str, content: Mapping[str, Any], field: str) -> str:
    """Read a text; "" where there is none."""
    value = content.get(field, "")
    if not isinstance(value, str):
        raise ValueError(
            f"{where}{field} = {value!r}: expected a text; write it in quotation marks"
        )
    return value


def whole_field(where: str, content: Mapping[str, Any], field: str, default: int) -> int:
    """Read a whole number."""
    value = content.get(field, default)
    if type(value) is not int or not 0 <= value <= 65_536:
        raise ValueError(f"{where}{field} = {value!r}: expected a whole number of at most 65536")
    return value


def check_fields(
    where: str, content: Any, expected: Set[str], options: Set[str] = frozenset()
) -> None:
    """Raise ValueError unless `content` is a mapping with these fields, and no others."""
    known = sorted(expected | options)
    if not isinstance(content, dict):
        what = where.removesuffix(".") or "the file"
        raise ValueError(f"{what} is no mapping, expected one with {known}")
    for field in sorted(set(content) - expected - options, key=str):
        raise ValueError(
            f"{where}{field} is unknown{did_you_mean(field, known)} Expected the fields {known}"
        )
    for field in sorted(expected - set(content)):
        raise ValueError(f"{where}{field} is missing; expected the fields {known}")
