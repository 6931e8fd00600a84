"""The house is as docs/architecture.md draws it: data flows down its list, imports point up it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ravan_flwr"
ENTRANCES = {"__init__", "__main__"}


def rooms():
    """Room -> its row in the list."""
    lines = (ROOT / "docs" / "architecture.md").read_text().splitlines()
    rows = [line.split("|")[1] for line in lines if line.startswith("| `")]
    found = {}
    for number, row in enumerate(rows):
        for name in re.findall(r"`([^`]+)`", row):
            found[name.removesuffix(".py").rstrip("/")] = number
    return found


def imported(path):
    """The rooms that a file imports from."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ravan_flwr"):
            within = (node.module or "").split(".")[1:2]
            yield from within or [alias.name for alias in node.names]


def test_every_file_has_its_place_and_imports_point_up():
    order = rooms()
    arrows = 0
    for path in PACKAGE.rglob("*.py"):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room in ENTRANCES:
            continue
        assert room in order, f"{room} is not in docs/architecture.md"
        for other in imported(path):
            assert order[other] <= order[room], f"{path} imports {other}, which is below it"
            arrows += 1
    assert arrows > 100


def test_the_list_names_nothing_that_is_not_there():
    names = [name for name in rooms() if not name.startswith("conf/")]
    missing = [n for n in names if not ((PACKAGE / n).is_dir() or (PACKAGE / f"{n}.py").is_file())]
    assert not missing
