"""Append the run's log lines, each with its time, to `log.txt` in its directory."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ravan_flwr.files import LARGE, check_file, opened
from ravan_flwr.runs.console import log

NAME = "log.txt"
_FORM = logging.Formatter("%(asctime)s %(levelname)-7s %(message)s", "%Y-%m-%d %H:%M:%S")


class _Appending(logging.FileHandler):
    """Append lines; a full disk loses some, and stops nothing."""

    def handleError(self, record: logging.LogRecord) -> None:
        del record


@contextmanager
def logging_to(folder: Path) -> Iterator[None]:
    """Append what the package logs meanwhile to the folder's log."""
    try:
        if (folder / NAME).exists():
            check_file(folder / NAME)
        # Text can hold halves of characters, which are no text in UTF-8.
        handler = _Appending(folder / NAME, encoding="utf-8", errors="backslashreplace")
    except (OSError, ValueError) as error:
        log.warning("no log file: %s", error)
        yield
        return
    handler.setFormatter(_FORM)
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)
        handler.close()


def last_lines(folder: Path, most: int = 200, most_bytes: int = 65536) -> list[str]:
    """Read the last lines of the folder's log; none if there is no log."""
    try:
        with opened(folder / NAME, LARGE) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - most_bytes))
            text = file.read().decode(errors="replace")
    except (OSError, ValueError):  # there is none, or it is none
        return []
    lines = text.splitlines()
    return lines[1 if size > most_bytes else 0 :][-most:]  # the first may have been cut
