"""The house is as docs/architecture.md draws it: rooms on floors, imports that point down."""

import re
from pathlib import Path

import pytest

from scripts import draw_house
from scripts.draw_house import PACKAGE, PAGE, arrows, floors, imported, page_with, picture, rooms

# The mathematics, and all that it needs: usable without Flower.
WITHOUT_FLOWER = [
    "adapters", "config", "data", "methods", "privacy", "secure", "seeding", "specs", "tasks",
    "training",
]  # fmt: skip


def modules_within(path, seen):
    """The files of this package that a file imports, and those that they import."""
    if path in seen:
        return
    seen.add(path)
    for name in imported(path):
        parts = name.split(".")
        if parts[0] != PACKAGE.name:
            continue
        for length in range(2, len(parts) + 1):
            place = PACKAGE.joinpath(*parts[1:length])
            for file in (place.with_suffix(".py"), place / "__init__.py"):
                if file.is_file():
                    modules_within(file, seen)


def test_imports_point_down():
    order = {room: number for number, floor in enumerate(floors()) for room in floor}
    below = arrows()
    assert all(order[other] < order[room] for room in below for other in below[room])
    assert sum(len(others) for others in below.values()) > 50


def test_a_circle_is_found(monkeypatch):
    monkeypatch.setattr(draw_house, "arrows", lambda: {"a": {"b"}, "b": {"c"}, "c": {"a"}})
    with pytest.raises(ValueError, match="circle: a -> b -> c -> a"):
        floors()


def test_the_page_has_the_picture_of_today():
    page = PAGE.read_text()
    assert page == page_with(picture()), "run python scripts/draw_house.py --write"


def test_the_page_has_a_line_for_each_room():
    lines = [line.split("|")[1] for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    listed = [name for line in lines for name in re.findall(r"`([a-z_]+)(?:/|\.py)`", line)]
    assert sorted(listed) == sorted(rooms())


def test_the_walk_through_a_round_names_every_file_of_the_server():
    walk = PAGE.read_text().split("## What happens to one round")[1].split("\n## ")[0]
    named = set(re.findall(r"`([a-z_]+/[a-z_]+\.py)`", walk))
    assert all((PACKAGE / path).is_file() for path in named)
    files = {f"server/{path.name}" for path in (PACKAGE / "server").glob("*.py")}
    assert files - {"server/__init__.py"} <= named


@pytest.mark.parametrize("room", WITHOUT_FLOWER)
def test_the_mathematics_imports_no_flower(room):
    needed: set[Path] = set()
    for path in rooms()[room]:
        modules_within(path, needed)
    assert len(needed) >= len(rooms()[room])
    with_flower = [
        path for path in needed if any(n.split(".")[0] == "flwr" for n in imported(path))
    ]
    assert not with_flower
