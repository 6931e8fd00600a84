"""Draw the subpackages of `ravan_flwr/` on their layers, and print the code of a round.

A subpackage is a folder, or a file beside the folders. It is one layer above the highest that it
imports, lazy imports included, so that every import points down.

    python scripts/draw_layers.py           print the picture
    python scripts/draw_layers.py --write   put picture and code into docs/architecture.md
"""

import ast
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "ravan_flwr"
PAGE = ROOT / "docs" / "architecture.md"
LAYERS = (
    "<!-- layers: made by scripts/draw_layers.py -->\n```text\n",
    "```\n<!-- end of layers -->",
)
ROUND = (
    "<!-- round: made by scripts/draw_layers.py -->\n```python\n",
    "```\n<!-- end of round -->",
)
# What the page prints of a round: the loop, then these functions.
LOOP = ("strategy.py", "start", "FederatedTuning")
FUNCTIONS = (
    ("strategy.py", "_train", "FederatedTuning"),
    ("strategy.py", "configure_train", "FederatedTuning"),
    ("strategy.py", "aggregate_train", "FederatedTuning"),
    ("transports.py", "exchange", "Plain"),
    ("releases.py", "read", "Release"),
    ("releases.py", "add", "Release"),
    ("releases.py", "close", "Release"),
)
ENTRANCES = {"__init__", "__main__"}  # they export what others define
WIDTH = 100


def subpackages() -> dict[str, list[Path]]:
    """List each subpackage and its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        subpackage = path.relative_to(PACKAGE).with_suffix("").parts[0]
        if subpackage not in ENTRANCES:
            found.setdefault(subpackage, []).append(path)
    return found


def imported(path: Path) -> Iterator[str]:
    """List the modules that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def arrows() -> dict[str, set[str]]:
    """Find the subpackages that each imports from."""
    found: dict[str, set[str]] = {subpackage: set() for subpackage in subpackages()}
    for subpackage, paths in subpackages().items():
        for name in (name for path in paths for name in imported(path)):
            package, _, rest = name.partition(".")
            other = rest.split(".")[0]
            if package == PACKAGE.name and other in found and other != subpackage:
                found[subpackage].add(other)
    return found


def layers() -> list[list[str]]:
    """Sort the subpackages into layers, the lowest first; ValueError for a circle of imports."""
    below = arrows()

    @cache
    def layer(subpackage: str, path: tuple[str, ...] = ()) -> int:
        if subpackage in path:
            raise ValueError(f"circle: {' -> '.join([*path, subpackage])}; take one import out")
        return 1 + max(
            (layer(other, (*path, subpackage)) for other in below[subpackage]), default=-1
        )

    found: list[list[str]] = []
    for subpackage in sorted(below, key=lambda subpackage: (layer(subpackage), subpackage)):
        found.extend([] for _ in range(layer(subpackage) + 1 - len(found)))
        found[layer(subpackage)].append(subpackage)
    return found


def picture() -> str:
    """Draw the layers as text, the topmost first."""
    folders = {
        subpackage for subpackage, paths in subpackages().items() if paths[0].parent != PACKAGE
    }
    lines = []
    for number, names in reversed(list(enumerate(layers(), 1))):
        boxes = "  ".join(f"[ {name}{'/' if name in folders else '.py'} ]" for name in names)
        lines += [f"{number:>2}  {boxes.center(WIDTH - 8)}".rstrip()]
    number = sum(len(others) for others in arrows().values())
    lines.append(
        f"    {len(subpackages())} subpackages on {len(layers())} layers, {number} imports"
    )
    return "\n".join(lines) + "\n"


def function_in(file: str, name: str, owner: str) -> tuple[str, ast.FunctionDef]:
    """Return the text of a file of the server, and a function of one of its classes."""
    text = (PACKAGE / "server" / file).read_text(encoding="utf-8")
    classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
    (body,) = (node.body for node in classes if node.name == owner)
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return text, next(node for node in functions if node.name == name)


def code_of_a_round() -> str:
    """Return the loop over the rounds, and the functions of a plain round, as they stand."""
    text, start = function_in(*LOOP)
    (loop,) = (node for node in start.body if isinstance(node, ast.For))
    parts = [f"# server/{LOOP[0]}", _source(text, loop)]
    for file, name, owner in FUNCTIONS:
        text, function = function_in(file, name, owner)
        parts += [f"# server/{file}", _source(text, function)]
    return "\n\n".join(parts).replace("\n\n#", "\n\n\n#").replace("py\n\n", "py\n") + "\n"


def _source(text: str, node: ast.stmt) -> str:
    return textwrap.dedent("\n".join(text.splitlines()[node.lineno - 1 : node.end_lineno]))


def page() -> str:
    """Return the page with the present picture and code."""
    text = PAGE.read_text(encoding="utf-8")
    for (begin, end), content in ((LAYERS, picture()), (ROUND, code_of_a_round())):
        before, rest = text.split(begin)
        text = before + begin + content + end + rest.split(end)[1]
    return text


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(picture())
