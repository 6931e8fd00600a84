"""Make what a node says fit for people: one line, no control characters, cut off.

Every text that comes from a node passes here once, where it enters; records, log lines and
reports show it as it is from then on.
"""

import reprlib
from collections.abc import Iterable

MOST_CHARACTERS = 500

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """Cut a text to one line of so many characters, in which nothing moves the cursor.

    A text that is plain already stays as it is.
    """
    cut = text[:most]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
    return line if len(line) <= most and len(text) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """Return the `repr` of the first few parts of a value, however large it is."""
    return plain(_short.repr(value))


def listed(reasons: Iterable[str], most: int = 3, between: str = "; ") -> str:
    """Join different reasons, the first few of them."""
    different = list(dict.fromkeys(reasons))
    extra = len(different) - most
    return between.join(different[:most]) + (f"{between}and {extra} more" if extra > 0 else "")
