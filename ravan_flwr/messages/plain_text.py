"""Sanitise texts from nodes: one line, no control characters, a limited length.

Every text from a node is sanitised once, when it arrives. Records, log lines and reports then show
it unchanged.
"""

import reprlib
from collections.abc import Iterable

MOST_CHARACTERS = 500

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return a text as one line of at most `most` characters, with control characters escaped.

    A text that is already plain is returned unchanged.
    """
    cut = text[:most]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
    return line if len(line) <= most and len(text) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """Return a short `repr` of a value of any size."""
    return plain(_short.repr(value))


def listed(reasons: Iterable[str], most: int = 3, between: str = "; ") -> str:
    """Return the first few different reasons, joined."""
    different = list(dict.fromkeys(reasons))
    extra = len(different) - most
    return between.join(different[:most]) + (f"{between}and {extra} more" if extra > 0 else "")
