"""What a node says, made fit for people: one line, no control characters, cut off.

Every text that comes from a node passes here once, where it enters; records, log lines and
reports show it as it is from then on.
"""

import reprlib

MOST_CHARACTERS = 500

_short = reprlib.Repr()
_short.maxstring = _short.maxother = 200
_short.maxlist = _short.maxtuple = _short.maxdict = 8


def plain(text: str, most: int = MOST_CHARACTERS) -> str:
    """One line of at most so many characters, in which nothing moves the cursor.

    What is plain already stays as it is.
    """
    cut = text[:most]
    line = "".join(char if char.isprintable() else repr(char)[1:-1] for char in cut)
    return line if len(line) <= most and len(text) <= most else f"{line[: most - 4]} ..."


def shown(value: object) -> str:
    """Like `repr`, of the first few parts: what a large value costs does not matter."""
    return plain(_short.repr(value))
