"""List the test files of each module of the package, as in tests/README.md.

A test file belongs to a module that it imports, or names in a text such as a monkeypatch's target.
A module that no test names is tested through the modules that import it.

    python -m scripts.list_tests           print the page
    python -m scripts.list_tests --write   write tests/README.md
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ravan_flwr.methods import METHODS
from scripts.draw_layers import ENTRANCES, PACKAGE, ROOT, imported

PAGE = ROOT / "tests" / "README.md"
MOST = 4  # test files of a module
HEAD = """# Which test is where
| folder | tests |
| --- | --- |
| [properties/](properties) | what holds for every method: exactness, unbiased means, privacy, hostile replies |
| [unit/](unit) | one module each |
| [runs/](runs) | whole runs in this process, and commands |
| [processes/](processes) | other processes: signals, locks, imports, workers |
| [flower/](flower) | Flower's runtime and deployments |
| [networks/](networks) | hosts in network namespaces, by `make networks` |

`make test` runs a fast choice of them (`fast.py`), `make test-all` all, and `make mutants` changes the code in one place at a time and lists the changes that no test notices (`scripts/mutants.py` says which tests are tried).
[CONTRIBUTING.md](../CONTRIBUTING.md) has what helps to write one.

## By module
Made by `python -m scripts.list_tests --write`: the test files that name a module, those with a similar name first.

| module of `ravan_flwr` | test files |
| --- | --- |
"""  # noqa: E501


def modules() -> list[str]:
    """Return the package's modules, as config/keys, without empty ones and the package itself."""
    paths = (path for path in sorted(PACKAGE.rglob("*.py")) if path.read_text().strip())
    names = [str(path.relative_to(PACKAGE).with_suffix("")) for path in paths]
    return [name for name in names if name not in ENTRANCES]


@cache
def named_in(path: Path) -> frozenset[str]:
    """Return the modules that a file imports or names."""
    texts = [*imported(path)]
    texts += [
        node.value
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    dotted = (name for text in texts for name in re.findall(r"\bravan_flwr((?:\.\w+)+)", text))
    named = {known for name in dotted for known in _prefixes(name[1:].split("."))}
    named |= {f"methods/{text.replace('-', '_')}" for text in texts if text in METHODS}
    return frozenset(named & _known())


@cache
def _known() -> frozenset[str]:
    return frozenset(modules())


def _prefixes(parts: list[str]) -> Iterator[str]:
    for length in range(1, len(parts) + 1):
        yield "/".join(parts[:length])
        yield "/".join([*parts[:length], "__init__"])


def tests_of(module: str) -> list[str]:
    """Return the test files that name a module, those with a similar name first."""
    files = [
        path for path in sorted((ROOT / "tests").rglob("test_*.py")) if module in named_in(path)
    ]
    words = set(re.split(r"[/_]", module))
    files.sort(key=lambda path: -len(words & set(re.split(r"[/_.]", str(path.relative_to(ROOT))))))
    return [str(path.relative_to(ROOT / "tests")) for path in files]


def importers(module: str) -> list[str]:
    """Return the modules of the package that import a module."""
    return [
        name for name in modules() if module in named_in(PACKAGE / f"{name}.py") and name != module
    ]


def page() -> str:
    """Return the text of tests/README.md."""
    rows = []
    for module in modules():
        files = tests_of(module)
        cell = ", ".join(f"[{name}]({name})" for name in files[:MOST])
        cell += ", and others" if len(files) > MOST else ""
        if not files:
            cell = "through " + ", ".join(f"`{name}`" for name in importers(module)[:MOST])
        rows.append(f"| `{module}` | {cell} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        sys.stdout.write(page())
