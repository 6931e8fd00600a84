"""Draw the partition: classes by client as a map; without classes how many examples each has."""

from pathlib import Path

import numpy as np

from ravan_flwr.messages import plain_text
from ravan_flwr.reports.charts import INK, Caption, Chart, bars, heat, plain
from ravan_flwr.reports.partition import Assignment
from ravan_flwr.runs.directory import write_atomically

FORMS = (".png", ".svg")
NUMBERED = 60  # clients that keep their places; more are sorted
LINES = 1000  # of the map; of more clients, neighbours are drawn as their mean
BARS = 200  # without classes; of more clients, neighbours are drawn as their mean
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
    number, few = len(found.sizes), len(found.sizes) <= NUMBERED
    order = np.arange(number) if few else found.in_order()
    title = plain_text.plain(f"{config.preset}: {number:,} clients, {config.partition}")
    if found.classes:
        kind = "class" if assigned.by_label else "value"
        about = f"{title}: which share of each client's examples is of which {kind}"
        shares = found.shares
        parts = np.array_split(order, min(number, LINES))
        names = [str(place) for place in range(len(found.classes))]
        if assigned.by_label and len(names) <= NAMED:
            names = [plain_text.plain(name, LETTERS) for name in found.classes]
        chart = heat(
            Caption("partition", title, about),
            np.stack([shares[part].mean(0) for part in parts]),
            [f"{client} ({size:,})" for client, size in enumerate(found.sizes) if few],
            names,
            x="class" if assigned.by_label else f"values of {assigned.classes!r}",
            y="client (examples)" if few else f"clients, by their largest {kind}",
            label="share of the client's examples",
        )
    else:
        about = f"{title}: how many examples each client has"
        parts = np.array_split(np.arange(number), min(number, BARS))
        sizes = {str(part[0]): float(found.sizes[order[part]].mean()) for part in parts}
        x = "client" if few else "clients, by size"
        chart = bars(Caption("partition", title, about), sizes, x, "examples")
    chart.figure.suptitle(plain(title), fontsize=11, color=INK)
    return chart
