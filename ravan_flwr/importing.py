"""Import torch and what builds on it faster."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Import what is heavy in here, in a process that is about to use it.

    Imports make a million objects that stay, and looking through them for garbage again and
    again takes a fifth of their time.
    """
    if "torch" in sys.modules or not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
