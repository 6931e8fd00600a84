"""Draw the rooms of `ravan_flwr/` on their floors, as docs/architecture.md shows them.

A room is a folder, or a file beside the folders. It stands one floor above the highest room that
it imports, lazy imports included, so that every import points down.

    python scripts/draw_house.py           print the picture
    python scripts/draw_house.py --write   put it into docs/architecture.md
"""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ravan_flwr"
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = (
    "<!-- layers: made by scripts/draw_house.py -->\n```text\n",
    "```\n<!-- end of layers -->",
)
FACES = {"__init__", "__main__"}  # they hand on what others define
WIDTH = 100


def rooms() -> dict[str, list[Path]]:
    """List each room and its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        room = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if room not in FACES:
            found.setdefault(room, []).append(path)
    return found


def imported(path: Path) -> Iterator[str]:
    """List the modules that a file imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> dict[str, set[str]]:
    """Find the rooms that each room imports from."""
    found: dict[str, set[str]] = {room: set() for room in rooms()}
    for room, paths in rooms().items():
        for name in (name for path in paths for name in imported(path)):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == PACKAGE.name and other in found and other != room:
                found[room].add(other)
    return found


def floors() -> list[list[str]]:
    """Sort the rooms into floors, the ground first; ValueError if imports go round in a circle."""
    below = arrows()

    @cache
    def floor(room: str, path: tuple[str, ...] = ()) -> int:
        if room in path:
            raise ValueError(f"circle: {' -> '.join([*path, room])}; take one import out")
        return 1 + max((floor(other, (*path, room)) for other in below[room]), default=-1)

    found: list[list[str]] = []
    for room in sorted(below, key=lambda room: (floor(room), room)):
        found.extend([] for _ in range(floor(room) + 1 - len(found)))
        found[floor(room)].append(room)
    return found


def picture() -> str:
    """Draw the floors as text, the topmost first."""
    folders = {room for room, paths in rooms().items() if paths[0].parent != PACKAGE}
    lines = []
    for number, names in reversed(list(enumerate(floors(), 1))):
        boxes = "  ".join(f"[ {name}{'/' if name in folders else '.py'} ]" for name in names)
        lines += [f"{number:>2}  {boxes.center(WIDTH - 8)}".rstrip()]
    number = sum(len(others) for others in arrows().values())
    lines.append(f"    {len(rooms())} subpackages on {len(floors())} layers, {number} imports")
    return "\n".join(lines) + "\n"


def page_with(drawn: str) -> str:
    """Put the picture into the page."""
    page = PAGE.read_text(encoding="utf-8")
    before, rest = page.split(BEGIN)
    return before + BEGIN + drawn + END + rest.split(END)[1]


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page_with(picture()), encoding="utf-8")
    else:
        sys.stdout.write(picture())
