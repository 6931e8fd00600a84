"""Run code at the start of a deployment's processes.

Python runs a `sitecustomize` on its path at every start.
"""

import os
import textwrap
from pathlib import Path

from tests import ROOT


def at_start(folder: Path, word: str, code: str) -> str:
    """Write a `sitecustomize`; return the PYTHONPATH with which processes run the code.

    Only those run it that have `word` in their command line.
    """
    folder.mkdir(exist_ok=True)
    guard = f"import sys\nif {word!r} in ' '.join(sys.orig_argv):\n"
    (folder / "sitecustomize.py").write_text(guard + textwrap.indent(code, "    "))
    return os.pathsep.join([str(folder), str(ROOT)])
