"""Speed up the import of torch and of libraries that build on it."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection in this block, for heavy imports.

    Imports make a million permanent objects. Repeated garbage collection among them takes a fifth
    of the imports' time.
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
