"""End a chat template that goes on and on, by counting the lines of it that run.

Jinja's sandbox bounds a range, but not loops within loops. The count is the same on every machine,
as a limit of seconds would not be. One line alone may still compute for long, or take much memory.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

MOST = 1_000_000  # a third of a second; a conversation of ten messages takes some hundred
_FILE = "<template>"  # as Jinja names what it compiles


class EndlessError(Exception):
    """Say that a template has taken more steps than any conversation needs."""


@contextmanager
def counted() -> Iterator[None]:
    """Raise `EndlessError` in a template that runs meanwhile, once it has taken too many steps."""
    taken = 0

    def line(_frame: FrameType, _event: str, _value: Any) -> Any:
        nonlocal taken
        taken += 1
        if taken > MOST:
            raise EndlessError
        return line

    def call(frame: FrameType, _event: str, _value: Any) -> Any:
        return line if frame.f_code.co_filename == _FILE else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        yield
    finally:
        sys.settrace(before)
