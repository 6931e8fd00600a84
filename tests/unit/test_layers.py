"""The package has the layers of docs/architecture.md, and imports point down."""

import re
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from scripts import draw_layers, list_tests
from scripts.draw_layers import PACKAGE, PAGE, arrows, imported, layers, subpackages

# The mathematics and its imports are usable without Flower.
WITHOUT_FLOWER = [
    "adapters", "config", "data", "methods", "privacy", "seeding", "specs", "tasks", "training",
]  # fmt: skip


def modules_within(path, visited):
    """Return the files of this package that a file imports, and the ones that these import."""
    if path in visited:
        return
    visited.add(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        for length in range(2, len(parts) + 1):
            place = PACKAGE.joinpath(*parts[1:length])
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    modules_within(file, visited)


def test_imports_point_down():
    order = {subpackage: number for number, layer in enumerate(layers()) for subpackage in layer}
    pairs = [(above, other) for above, others in arrows().items() for other in others]
    assert all(order[other] < order[above] for above, other in pairs)
    assert len(pairs) > 50


def file_of(name):
    """Return the file of the package in which an imported name is; None if it is elsewhere."""
    package, *parts = name.split(".")
    for length in range(len(parts) if package == PACKAGE.name else 0, 0, -1):
        place = PACKAGE.joinpath(*parts[:length])
        for file in (place.with_suffix(".py"), place / "__init__.py"):
            if file.is_file():
                return file
    return None


def test_one_file_names_the_optional_parts():
    others = [path for path in PACKAGE.rglob("*.py") if "extras" not in path.parts]
    naming = [path.name for path in others if "ravan_flwr.extras" in path.read_text()]
    assert naming == ["optional.py"]


def test_no_file_imports_itself_through_others():
    """Not even for types alone."""
    imports = {
        path: {file_of(name) for name in imported(path)} - {None, path}
        for path in PACKAGE.rglob("*.py")
    }
    assert sum(map(len, imports.values())) > 500
    TopologicalSorter(imports).prepare()  # raises CycleError


def test_a_circular_import_is_found(monkeypatch):
    monkeypatch.setattr(draw_layers, "arrows", lambda: {"a": {"b"}, "b": {"c"}, "c": {"a"}})
    with pytest.raises(ValueError, match="circle: a -> b -> c -> a"):
        layers()


def test_the_page_has_the_current_picture_and_code():
    assert PAGE.read_text() == draw_layers.page(), "run python scripts/draw_layers.py --write"


def test_the_page_has_a_line_for_each_subpackage():
    lines = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = [name for line in lines for name in re.findall(r"`([a-z_]+)(?:/|\.py)`", line)]
    assert sorted(listed) == sorted(subpackages())


def test_the_walk_through_a_round_names_every_file_of_the_server():
    walk = PAGE.read_text().split("## Before the first round")[1].split("\n## RAVAN")[0]
    named_files = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", walk))
    assert all((PACKAGE / path).is_file() for path in named_files)
    files = {f"server/{path.name}" for path in (PACKAGE / "server").glob("*.py")}
    assert files - {"server/__init__.py"} <= named_files


PROTOCOL = [
    PACKAGE / "extras" / "secure" / f"{name}.py"
    for name in (
        "agreement", "client", "fixed_point", "node_keys", "schedule", "server", "shamir",
    )
]  # fmt: skip
PRIVATE_STEPS = [
    PACKAGE / "extras" / "example_privacy" / f"{name}.py"
    for name in ("cost", "gradients", "rules", "steps")
]


@pytest.mark.parametrize(
    "paths", [*(subpackages()[name] for name in WITHOUT_FLOWER), PROTOCOL, PRIVATE_STEPS],
    ids=[*WITHOUT_FLOWER, "extras/secure", "extras/example_privacy"],
)  # fmt: skip
def test_the_mathematics_imports_no_flower(paths):
    needed: set[Path] = set()
    for path in paths:
        modules_within(path, needed)
    assert len(needed) >= len(paths)
    assert not [path for path in needed if {"flwr"} & {n.split(".")[0] for n in imported(path)}]


def test_the_page_of_tests_names_tests_of_every_module():
    page = list_tests.PAGE.read_text(encoding="utf-8")
    assert page == list_tests.page(), "run python -m scripts.list_tests --write"
    assert all(f"| `{module}` | " in page for module in list_tests.modules())
    assert "| through  |" not in page
