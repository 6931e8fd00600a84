"""Draw and write a confusion matrix: which class was taken for which, and how often."""

import csv
import io
from collections.abc import Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure

from ravan_flwr.reports.chart import STYLE, Chart, plain
from ravan_flwr.reports.table_file import no_formula

_LETTERS = 24  # of a name; the table beside the picture has it whole


def confusion(
    name: str, title: str, about: str, counts: Sequence[Sequence[int]], labels: Sequence[str]
) -> Chart:
    """Draw how often examples of each class (a row) were taken for each class (a column).

    The colour is the share of the row, so that rare classes are seen as well; nothing is drawn
    where there is no example. Cells and letters stay legible from two classes to a hundred.
    """
    table = np.asarray(counts, float)
    number = len(table)
    shares = np.ma.masked_equal(table / np.maximum(table.sum(1, keepdims=True), 1), 0)
    names = [plain(_short(label)) for label in labels]
    cell = max(0.23, min(0.6, 4 / number))  # inches
    letters = 8 if number <= 20 else 7
    names_take = 0.065 * max(map(len, names)) * (2 if number > 20 else 1)
    side = number * cell + 0.4 + names_take
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(max(side + 1.0, 4.4), max(side, 3.4)))
        axes = figure.add_subplot()
        axes.grid(visible=number > 20)  # to follow a long row to its name
        image = axes.imshow(shares, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
        axes.set_xticks(range(number), names, fontsize=letters, rotation=90)
        axes.set_yticks(range(number), names, fontsize=letters)
        axes.set_xlabel("predicted class")
        axes.set_ylabel("right class")
        axes.tick_params(labeltop=number > 20, labelright=number > 20)
        widest = len(f"{table.max():.0f}")
        size = min(letters, 72 * cell / (0.72 * widest))  # points, so that a number fits its cell
        for row, column in zip(*np.nonzero(table), strict=True):
            colour = "#ffffff" if shares[row, column] < 0.6 else "#000000"
            centred: dict[str, Any] = {"ha": "center", "va": "center"}
            count = f"{table[row, column]:.0f}"
            axes.text(column, row, count, fontsize=size, color=colour, **centred)
        bar = figure.colorbar(image, ax=axes, label="share of the class", fraction=0.03)
        bar.outline.set_visible(False)
    numbers = confusion_csv(counts, labels)
    return Chart(name, title, about, figure, broad=number > 10, numbers=numbers)


def _short(name: str) -> str:
    """Cut a name to one line that leaves room for the picture."""
    line = " ".join(name.split())
    return line if len(line) <= _LETTERS else f"{line[: _LETTERS - 1]}…"


def confusion_csv(counts: Sequence[Sequence[int]], labels: Sequence[str]) -> bytes:
    """Write the numbers as a table for spreadsheets: rows are right, columns are predicted."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["right / predicted", *map(no_formula, labels)])
    table.writerows([no_formula(label), *row] for label, row in zip(labels, counts, strict=True))
    return text.getvalue().encode(errors="backslashreplace")
