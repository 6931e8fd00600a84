"""Check what arrives: texts become one line, without control characters, of a limited length.

Every text from a node is sanitised once, when it arrives. Records, log lines and reports then show
it unchanged.
"""

import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import fields
from typing import Any, cast, get_origin

MOST_CHARACTERS = 500

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def plain(text: str, max_length: int = MOST_CHARACTERS) -> str:
    """Return a text as one line of up to `max_length` characters, with control characters escaped.

    A text that is already plain is returned unchanged.
    """
    cut = text[:max_length]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
    return (
        line
        if len(line) <= max_length and len(text) <= max_length
        else f"{line[: max_length - 4]} ..."
    )


def shown(value: object) -> str:
    """Return a short `repr` of a value of any size."""
    return plain(_short.repr(value))


def listed(reasons: Iterable[str], max_items: int = 3, between: str = "; ") -> str:
    """Return the first few different reasons, joined."""
    different = list(dict.fromkeys(reasons))
    extra = len(different) - max_items
    return between.join(different[:max_items]) + (f"{between}and {extra} more" if extra > 0 else "")


def read_fields(data_class: type, values: Mapping[str, Any], *omitted: str) -> dict[str, Any]:
    """Return the values of a dataclass's fields but the omitted ones, by name.

    Fields have the same names with hyphens in an untrusted message; a tuple travels as a list.
    Raise ValueError if a value is missing or of another type.
    """
    found: dict[str, Any] = {}
    for field in fields(data_class):
        if field.name not in omitted:
            key, declared = field.name.replace("_", "-"), get_origin(field.type) or field.type
            expected = list if declared is tuple else cast(type, declared)
            found[field.name] = value = values.get(key)
            if type(value) is not expected:
                raise ValueError(f"{key} is {shown(value)}, expected {expected.__name__}")
    return found
