"""Draw the partition: classes by client as a map, and beside it how many examples each has."""

from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ravan_flwr.messages import plain_text
from ravan_flwr.reports.charts import COLOURS, STYLE, Chart, draw_map, plain
from ravan_flwr.reports.partition import Assignment, PartitionReport
from ravan_flwr.runs.directory import write_atomically

FORMS = (".png", ".svg")
NUMBERED = 60  # clients that keep their places; more are sorted
LINES = 1000  # of the map; of more clients, neighbours are drawn as their mean
NAMED = 25  # classes that are named below the map
LETTERS = 14  # of such a name


def check_picture(path: Path) -> None:
    """Raise ValueError unless a picture can be written there."""
    if path.suffix.lower() not in FORMS:
        raise ValueError(f"--picture {path}: expected a name that ends in {' or '.join(FORMS)}")
    if path.is_dir() or not path.absolute().parent.is_dir():
        what = "is a folder" if path.is_dir() else f"found no folder {path.absolute().parent}"
        raise ValueError(f"--picture {path}: {what}; expected the name of a file to write")
    if path.exists():
        raise ValueError(f"--picture {path} is there already, expected a new file; name one")


def write_picture(assigned: Assignment, path: Path) -> None:
    """Write the picture as PNG or SVG, as the name of the file ends."""
    chart = draw(assigned)
    svg = path.suffix.lower() == ".svg"
    write_atomically(path, chart.svg().encode() if svg else chart.png())


def draw(assigned: Assignment) -> Chart:
    """Draw the partition. No name of a client is in the picture: it may be sent to others.

    Nor is any value of a column that is not the task's label, since these may be users.
    """
    found, config = assigned.report, assigned.config
    number = len(found.sizes)
    order = np.arange(number) if number <= NUMBERED else found.in_order()
    title = plain_text.plain(f"{config.preset}: {number:,} clients, {config.partition}")
    about = f"{title}: how many examples each client has"
    with mpl.rc_context(STYLE):
        height = min(9.0, max(3.2, 0.16 * number + 1.6))
        figure = Figure(figsize=(9.0 if found.classes else 5.2, height))
        figure.suptitle(plain(title), fontsize=11)
        if found.classes:
            about += ", and of which " + ("classes" if assigned.by_label else _counted(assigned))
            left, right = figure.subplots(1, 2, sharey=True, width_ratios=[3, 1])
            _map(figure, left, found, order, named=assigned.by_label)
            left.set_xlabel("class" if assigned.by_label else plain(_counted(assigned)))
        else:
            left = right = figure.subplots()
        _sizes(right, found.sizes[order])
        left.set_ylabel("client" if number <= NUMBERED else _sorted(assigned))
        left.yaxis.set_major_locator(MaxNLocator(integer=True))
        left.set_ylim(number - 0.5, -0.5)
    return Chart("partition", title, about, figure, broad=True)


def _counted(assigned: Assignment) -> str:
    return f"values of {assigned.classes!r}"


def _sorted(assigned: Assignment) -> str:
    if not assigned.report.classes:
        return "clients, by size"
    return f"clients, by their largest {'class' if assigned.by_label else 'value'}"


def _map(
    figure: Figure, axes: Axes, found: PartitionReport, order: np.ndarray, *, named: bool
) -> None:
    """Draw which share of each client's examples is of which class, by name or by number."""
    number, classes = found.counts.shape
    lines = np.array_split(found.shares[order], min(number, LINES))
    table = np.stack([part.mean(0) for part in lines])
    extent = (-0.5, classes - 0.5, number - 0.5, -0.5)
    label = "share of the client's examples"
    draw_map(figure, axes, table, label, extent=extent, location="left")
    if named and classes <= NAMED:
        names = [plain_text.plain(name, LETTERS) for name in found.classes]
        long = max(map(len, names)) > 3
        slanted: dict[str, Any] = {"rotation": 45, "ha": "right"} if long else {}
        axes.set_xticks(range(classes), [plain(name) for name in names], fontsize=9, **slanted)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def _sizes(axes: Axes, sizes: np.ndarray) -> None:
    """Draw how many examples each client has."""
    places = np.arange(len(sizes))
    if len(sizes) <= NUMBERED:
        axes.barh(places, sizes, color=COLOURS[0], height=0.8)
    else:  # thousands of bars would be as many shapes
        axes.stairs(
            sizes, np.arange(len(sizes) + 1) - 0.5, orientation="horizontal", fill=True,
            color=COLOURS[0],
        )  # fmt: skip
    axes.grid(visible=False, axis="y")
    axes.set_xlim(0, None)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True))
    axes.set_xlabel("examples")
