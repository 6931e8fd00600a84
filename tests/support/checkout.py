"""Copy a checkout as a developer has it, without `.venv`, which has 50,000 files."""

import shutil
from pathlib import Path

from tests.support import ROOT

FOLDERS = ("ravan_flwr", "conf", "deploy", "docs", "scripts", "tests")
# Files that a package must not contain.
BESIDE = (".venv/lib/site-packages/torch/__init__.py", "runs/1/rounds.jsonl", "data/a.py", "b.fab")


def copy_checkout(folder: Path) -> Path:
    """Copy the files that packages are built from, and add files that they must not contain."""
    folder.mkdir()
    for path in (*map(ROOT.joinpath, FOLDERS), *filter(Path.is_file, ROOT.iterdir())):
        if path.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(path, folder / path.name, ignore=ignored)
        else:
            shutil.copy(path, folder)
    for name in BESIDE:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return folder
