"""The kinds of picture that reports, studies and plans are made of: lines, bands, bars, points.

Lines differ in their dashes as well as in their colours, and points in their shapes.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ravan_flwr.reports.chart import COLOURS, INK, STYLE, Chart, plain

_WIDTH = 5.2  # inches
_WIDE = 30  # times the smallest bar: beyond it a logarithmic axis shows both
_FAR = 20  # times the shortest line: beyond it a logarithmic axis shows both
_MOST_COUNTED = 12  # bars that have room for their numbers
_ROOM = 56  # letters beside each other in a legend within the axes
_LONGEST = 84  # letters of a line's name above them
DASHES: tuple[str, ...] = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


@dataclass(frozen=True)
class Series:
    """One line of a chart: a point a round for each of several runs (seeds)."""

    label: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]  # x and y of each


Ends = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # of a band; runs by points


def least_and_greatest(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Let a band reach over all runs."""
    return values.min(0), values.max(0)


def lines(
    name: str,
    title: str,
    about: str,
    series: Sequence[Series],
    x: str,
    y: str,
    whole: bool = True,
    ends: Ends = least_and_greatest,
    top: float | None = None,
) -> Chart:
    """Draw means over runs as lines, each with a band; the vertical axis ends at `top` at most."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        for number, one in enumerate(series):
            colour, dash = COLOURS[number % len(COLOURS)], DASHES[number % len(DASHES)]
            band(axes, one, colour, dash, 0.2 if len(series) < 5 else 0.08, ends)
        axes.set_xlabel(plain(x))
        axes.set_ylabel(plain(y))
        if whole:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        elif ends_far_apart(series):
            axes.set_xscale("log")
        if top is not None and axes.get_ylim()[1] > top:
            axes.set_ylim(top=top)
        if len(series) > 1:
            _legend(figure, axes, [one.label for one in series])
    return Chart(name, title, about, figure)


def _legend(figure: Figure, axes: Axes, labels: Sequence[str]) -> None:
    """Name the lines within the axes, or above them where names are long."""
    columns = 1 if len(labels) < 5 else 2
    if columns * max(map(len, labels)) <= _ROOM:
        axes.legend(fontsize=9, ncols=columns)
        return
    figure.set_figheight(figure.get_figheight() + 0.19 * len(labels))
    told = figure.legend(fontsize=8, loc="outside upper left")
    for text in told.get_texts():
        text.set_text(textwrap.shorten(text.get_text(), _LONGEST, placeholder=" …"))


def ends_far_apart(series: Sequence[Series]) -> bool:
    """Tell whether some lines end so much further to the right that the others would vanish.

    Where one ends at 0 no logarithmic axis can show it.
    """
    ends = [x[-1] for one in series for x, _ in one.runs if len(x)]
    return bool(ends) and 0 < min(ends) < max(ends) / _FAR


def band(axes: Axes, series: Series, colour: str, dash: str, opacity: float, ends: Ends) -> None:
    """Draw the mean over runs as a line, in a band if there are several."""
    runs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in series.runs if len(x)]
    if not runs:
        return
    # Runs may have points at other places (bytes): compare them where the shortest has some.
    grid = min((x for x, _ in runs), key=lambda x: (x[-1], len(x)))
    values = np.stack([np.interp(grid, x, y) for x, y in runs])
    marker = "o" if len(grid) == 1 else None
    axes.plot(
        grid, values.mean(0), dash, color=colour, label=plain(series.label), lw=1.8, marker=marker
    )
    if len(runs) > 1:
        axes.fill_between(grid, *ends(values), color=colour, alpha=opacity, lw=0)


def bands(
    name: str,
    title: str,
    about: str,
    x: Sequence[float],
    middle: Sequence[float],
    ranges: Mapping[str, Sequence[tuple[float, float]]],
    labels: tuple[str, str],
) -> Chart:
    """Draw a median as a line, in bands from the least to the greatest; the broadest is first."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        for number, (label, ends) in enumerate(ranges.items()):
            low, high = zip(*ends, strict=True)
            look: dict[str, Any] = {"color": COLOURS[0], "alpha": 0.15 + 0.15 * number}
            if len(x) == 1:  # a band of one round would have no width
                axes.vlines(x, low, high, lw=8 + 6 * number, label=label, **look)
            else:
                axes.fill_between(x, low, high, lw=0, label=label, **look)
        axes.plot(x, middle, color=COLOURS[0], lw=1.8, marker="o", ms=3, label="median")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_xlabel(labels[0])
        axes.set_ylabel(plain(labels[1]))
        axes.legend(fontsize=9)
    return Chart(name, title, about, figure)


def bars(
    name: str,
    title: str,
    about: str,
    values: Mapping[str, float],
    x: str,
    y: str,
    *,
    counted: bool = False,
) -> Chart:
    """Draw one bar for each name; `counted` ones have their numbers, and may differ widely."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        drawn = axes.bar(range(len(values)), list(values.values()), color=COLOURS[0], width=0.8)
        if counted and max(values.values()) > _WIDE * min(filter(None, values.values())):
            axes.set_yscale("log")
            axes.yaxis.set_major_formatter("{x:,.0f}")
            axes.set_ylim(0.5, 2 * max(values.values()))
            y = f"{y}, logarithmic"
        if counted and len(values) <= _MOST_COUNTED:
            axes.bar_label(drawn, [f"{value:,.0f}" for value in values.values()], fontsize=8)
        step = -(-len(values) // 10)
        axes.set_xticks(range(0, len(values), step), [plain(n) for n in list(values)[::step]])
        if axes.get_yscale() == "linear":
            axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(x)
        axes.set_ylabel(y)
    return Chart(name, title, about, figure)


def stacks(
    name: str,
    title: str,
    about: str,
    x: Sequence[float],
    parts: Mapping[str, Sequence[float]],
    labels: tuple[str, str],
) -> Chart:
    """Draw parts on top of each other at each x."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        bottom = np.zeros(len(x))
        for number, (part, values) in enumerate(parts.items()):
            axes.bar(x, values, bottom=bottom, color=COLOURS[number], label=part, width=0.8)
            bottom += np.asarray(values)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.grid(visible=False, axis="x")
        axes.set_xlabel(labels[0])
        axes.set_ylabel(labels[1])
        axes.legend(fontsize=9, ncols=len(parts), loc="lower left", bbox_to_anchor=(0, 1))
    return Chart(name, title, about, figure)


def boxes(
    name: str, title: str, about: str, values: Mapping[str, Sequence[float]], y: str
) -> Chart:
    """Draw the distribution of numbers under each name: median, quartiles, and outliers."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        drawn = axes.boxplot(
            [list(numbers) for numbers in values.values()],
            tick_labels=[plain(name) for name in values],
            patch_artist=True,
            medianprops={"color": INK},
            boxprops={"edgecolor": INK},
            whiskerprops={"color": INK},
            capprops={"color": INK},
            flierprops={"markeredgecolor": INK, "markersize": 3},
        )
        for number, box in enumerate(drawn["boxes"]):
            box.set_facecolor(COLOURS[number % len(COLOURS)])
        axes.tick_params(axis="x", labelrotation=25 if len(values) > 3 else 0)
        axes.set_ylabel(y)
    return Chart(name, title, about, figure)


def points(
    name: str,
    title: str,
    about: str,
    places: Sequence[str],
    values: Mapping[str, Sequence[tuple[float, float | None] | None]],
    y: str,
) -> Chart:
    """Draw for each name a point with a bar at each place: what it is there, how far that reaches.

    The points of a place stand side by side, in the order of the names; None leaves one out.
    """
    apart = 0.8 / len(values)
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        figure.set_figwidth(max(_WIDTH, 0.16 * len(values) * len(places)))
        for number, (label, found) in enumerate(values.items()):
            shift = (number - (len(values) - 1) / 2) * apart
            known = [(place + shift, *one) for place, one in enumerate(found) if one is not None]
            at, means, halves = zip(*known, strict=True)
            axes.errorbar(
                at,
                means,
                [half or 0.0 for half in halves],
                fmt=MARKERS[number % len(MARKERS)],
                color=COLOURS[number % len(COLOURS)],
                ms=5,
                lw=1.2,
                label=plain(label),
            )
        wrapped = [textwrap.fill(plain(place), 12) for place in places]
        axes.set_xticks(range(len(places)), wrapped, fontsize=9)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(plain(y))
        room = _ROOM * figure.get_figwidth() / _WIDTH
        columns = max(1, int(room / (max(map(len, values)) + 4)))
        figure.legend(fontsize=9, ncols=min(columns, len(values)), loc="outside upper center")
    return Chart(name, title, about, figure, broad=figure.get_figwidth() > _WIDTH)


def heat(
    name: str,
    title: str,
    about: str,
    values: Sequence[Sequence[float]],
    rows: Sequence[str],
    label: str,
) -> Chart:
    """Draw a map of numbers, layers by heads; each cell has its number where there is room."""
    table = np.asarray(values, float)
    with mpl.rc_context(STYLE):
        figure, axes = _figure(height=max(2.6, 0.32 * len(table) + 1.0))
        axes.grid(visible=False)
        top = float(table.max()) or 1.0
        image = axes.imshow(table, aspect="auto", cmap="viridis", vmin=0, vmax=top)
        axes.set_xticks(range(table.shape[1]), [str(i) for i in range(table.shape[1])])
        axes.set_yticks(range(len(table)), [plain(row) for row in rows], fontsize=8)
        axes.set_xlabel("head")
        if table.size <= 128:
            for (row, column), value in np.ndenumerate(table):
                colour = "#ffffff" if value < 0.6 * top else "#000000"
                centred: dict[str, Any] = {"ha": "center", "va": "center"}
                axes.text(column, row, f"{value:.3g}", fontsize=8, color=colour, **centred)
        bar = figure.colorbar(image, ax=axes, label=label)
        bar.outline.set_visible(False)
    return Chart(name, title, about, figure)


def _figure(height: float = 3.2) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(_WIDTH, height))
    return figure, figure.add_subplot()
