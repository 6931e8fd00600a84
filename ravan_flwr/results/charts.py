"""The charts of reports and studies: lines, panels, bars, boxes, points, heat maps.

Lines differ in their dashes as well as in their colours, and points in their shapes.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, MaxNLocator, NullLocator
from numpy.typing import ArrayLike

from ravan_flwr.files import write_atomically
from ravan_flwr.messages import plain_text
from ravan_flwr.runs.history import shorten

INK = "#010203"
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#B97F00", "#3A93CC", "#8C6BB1", "#7F7F7F")
_INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
STYLE: dict[Any, Any] = dict.fromkeys((*_INKED, "grid.color"), INK) | {
    "font.family": "sans-serif", "font.size": 11, "svg.fonttype": "none",
    "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.12,
    "axes.axisbelow": True, "legend.frameon": False, "figure.constrained_layout.use": True,
    "savefig.transparent": True,
}  # fmt: skip
# A new figure gets a layout engine; `Chart` runs it once, before the figure is first saved.
_DRAWN = STYLE | {"figure.constrained_layout.use": False}
_DPI = 150


class Caption(NamedTuple):
    """The name of a picture's file, its heading, and a sentence on what it shows."""

    name: str
    title: str
    about: str  # below the heading, and the alternative text


@dataclass(frozen=True)
class Chart:
    """A figure with its caption."""

    name: str
    title: str
    about: str
    figure: Figure
    broad: bool = False  # needs a page's whole width, unscaled
    numbers: bytes = b""  # the data of the chart as CSV

    def svg(self) -> Markup:
        """Return an SVG in the page's colour, without styles that the page's policy forbids."""
        buffer = io.StringIO()
        with mpl.rc_context(_DRAWN | {"svg.hashsalt": self.name}):
            self._save(self.figure, buffer, format="svg", metadata={"Date": None})
        text = buffer.getvalue()
        text = text[text.index("<svg") :].replace(INK, "currentColor")
        text = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
        # Ids of groups repeat in each picture, and nothing refers to them.
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r' style="([^"]*)"', _as_attributes, text)
        label = Markup('<svg role="img" aria-label="{}" stroke-linejoin="round"')
        # matplotlib has escaped the texts in it.
        return Markup(text.replace("<svg", label.format(self.about), 1))  # noqa: S704

    def png(self) -> bytes:
        """Return the PNG, on white."""
        buffer = io.BytesIO()
        with mpl.rc_context(_DRAWN | {"savefig.transparent": False}):
            self._save(self.figure, buffer, format="png", dpi=_DPI, facecolor="white")
        return buffer.getvalue()

    def write(self, folder: Path) -> list[Path]:
        """Write the PNG, and the CSV if the chart has numbers; return the paths."""
        written = {folder / f"{self.name}.png": self.png()}
        if self.numbers:
            written[folder / f"{self.name}.csv"] = self.numbers
        for path, content in written.items():
            write_atomically(path, content)
        return list(written)

    @staticmethod
    def _save(figure: Figure, buffer: Any, **options: Any) -> None:
        """Lay the figure out, once for all formats, and save it."""
        with warnings.catch_warnings():  # a page's font has glyphs that matplotlib's lacks
            warnings.filterwarnings("ignore", message="Glyph .* missing from font")
            if (engine := figure.get_layout_engine()) is not None:
                engine.execute(figure)
                figure.set_layout_engine(None)
            figure.savefig(buffer, **options)


def _as_attributes(style: re.Match[str]) -> str:
    """Rewrite an SVG element's style as attributes, which the page's policy does not forbid."""
    pairs = (part.partition(":") for part in style[1].split("; "))
    return "".join(f' {name.strip()}="{value.strip()}"' for name, _, value in pairs)


def plain(text: str) -> str:
    """Escape a text, such as a path, so that matplotlib can draw it.

    Dollars are escaped, since matplotlib parses a formula between two of them. So are unprintable
    characters: lone surrogates, ends of lines, and characters that change the direction of writing.
    """
    return plain_text.plain(text).replace("$", r"\$")


_WIDTH, _HEIGHT = 5.2, 3.2  # inches
_FAR = 20  # ratio of lines' ends beyond which the axis is logarithmic
_LEGEND_LETTERS = 56  # in a row of a legend, of a figure of `_WIDTH`
_LINE_LETTERS = 7  # as wide as a line in a legend, with the space around it
_LEGEND_ROWS = 8  # of all names together: less than a third of the figure
_NAME_LETTERS = 32  # of a name beside a heat map
_MAX_NAMES = 40  # beside a heat map, and below it
_MAX_IN_CELLS = 20  # columns of a heat map with numbers in its cells
_COLUMNS = 4  # of panels, at most
_LARGEST = 1e30  # larger numbers are not drawn
_GREY = "#7F7F7F"
DASHES: tuple[str, ...] = ("-", "--", "-.", ":")
MARKERS = "osD^vP*X"


def _look(number: int) -> tuple[str, str, str]:
    """Return the colour, dash and marker of the line with this number; 32 differ."""
    round_, place = divmod(number, len(COLOURS))
    dash, marker = DASHES[(place + round_) % len(DASHES)], MARKERS[(place + round_) % len(MARKERS)]
    return COLOURS[place], dash, marker


# (runs, points) -> lower and upper end of a band at each point
Ends = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


@dataclass(frozen=True)
class Series:
    """One line of a chart: a point a round for each of several runs (seeds).

    Its place among the lines of a chart is its colour. A line without points keeps the others'.
    """

    label: str
    runs: Sequence[tuple[Sequence[float], Sequence[float]]]  # x and y of each


def min_and_max(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of a band over all runs."""
    return values.min(0), values.max(0)


def lines(
    caption: Caption, series: Sequence[Series], x: str, y: str, *, integers: bool = True,
    ends: Ends = min_and_max, top: float | None = None,
) -> Chart:  # fmt: skip
    """Draw means over runs as lines with bands; the vertical axis ends at `top` at most."""
    rows = _LEGEND_ROWS // max(1, len(series))
    labels = _wrapped([line.label for line in series], _LEGEND_LETTERS, rows)
    series = [replace(line, label=label) for line, label in zip(series, labels, strict=True)]
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        for number, line in enumerate(series):
            _band(axes, line, number, 0.2 if len(series) < 5 else 0.08, ends)
        _name(axes, x, y)
        places = {float(at) for line in axes.lines for at in np.asarray(line.get_xdata())}
        if len(places) == 1:  # a single value: its axis is not a millionth of it
            (place,) = places
            axes.set_xlim((0, 2 * place) if place > 0 else (place - 1, place + 1))
        if integers:
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        else:
            axes.set_xscale(**_scale(series))
        if top is not None and axes.get_ylim()[1] > top:
            axes.set_ylim(top=top)
        if len(series) > 1:
            _legend(figure, axes.get_legend_handles_labels()[1])
    return Chart(*caption, figure)


def _wrapped(names: Sequence[str], letters: int, rows: int = 4) -> list[str]:
    """Break names into lines, and cut long ones at the end; equal ones then get a number."""
    rows = max(1, min(4, rows))
    wrapper = textwrap.TextWrapper(
        letters, max_lines=rows, placeholder=" …", break_on_hyphens=False
    )
    texts = [wrapper.fill(plain(name)) for name in names]
    return [f"{t} {n}" if texts.count(t) > 1 else t for n, t in enumerate(texts, start=1)]


def _legend(figure: Figure, labels: Collection[str]) -> None:
    """Draw the legend above the axes, in as many columns as the names leave room for."""
    longest = max(map(len, "\n".join(labels).split("\n")))
    number = sum(label.count("\n") + 1 for label in labels)
    letters = int(_LEGEND_LETTERS * figure.get_figwidth() / _WIDTH)
    columns = letters // (longest + _LINE_LETTERS)
    columns = max(1, min(columns, len(labels)))
    figure.set_figheight(figure.get_figheight() + 0.19 * -(-number // columns))
    figure.legend(fontsize=9, ncols=columns, loc="outside upper center")


def _scale(series: Sequence[Series]) -> dict[str, Any]:
    """Return the scale of the x axis: logarithmic if a linear one hides lines that end early.

    Where a line ends at 0, the axis is linear up to the end of the next one.
    """
    ends = [x[-1] for line in series for x, _ in line.runs if len(x)]
    positive = [end for end in ends if end > 0]
    if not positive or min(positive) >= max(positive) / _FAR:
        return {"value": "linear"}
    return {"value": "symlog", "linthresh": min(positive)} if 0 in ends else {"value": "log"}


def _band(
    axes: Axes, series: Series, number: int, opacity: float, ends: Ends, dash: str = ""
) -> None:
    """Draw the mean over runs as the line with this number, in a band if there are several.

    A single value is a point, and its band a bar.
    """
    runs = [(np.asarray(x, float), np.asarray(y, float)) for x, y in series.runs]
    masks = [(np.abs(x) < _LARGEST) & (np.abs(y) < _LARGEST) for x, y in runs]
    runs = [(x[mask], y[mask]) for (x, y), mask in zip(runs, masks, strict=True) if mask.any()]
    if not runs:
        return
    # Runs may have points at different x (bytes): interpolate them at those of the shortest run.
    grid = min((x for x, _ in runs), key=lambda x: (x[-1], len(x)))
    values = np.stack([np.interp(grid, x, y) for x, y in runs])
    colour, own_dash, marker = _look(number)
    one_value = len(grid) == 1
    style: dict[str, Any] = {"color": colour, "marker": marker if one_value else None, "lw": 1.8}
    axes.plot(grid, values.mean(0), dash or own_dash, label=series.label, **style)
    if len(runs) > 1:
        width = 6 if one_value else 0
        axes.fill_between(grid, *ends(values), color=colour, alpha=opacity, lw=width)


def panels(
    caption: Caption, series: Sequence[Series], against: str, x: str, y: str, *,
    ends: Ends = min_and_max, logarithmic: bool = False,
    mark: Callable[[Axes, Series, str], None] | None = None,
) -> Chart:  # fmt: skip
    """Draw a panel for each series that has points; the series `against` is dotted in each.

    `mark` draws on a panel. If lines end far apart, the x axis is logarithmic in any case.
    """
    numbers = [n for n, line in enumerate(series) if any(len(xs) for xs, _ in line.runs)]
    columns = min(_COLUMNS, len(numbers))
    rows = -(-len(numbers) // columns)
    reference = next((n for n in numbers if series[n].label == against), None)
    with mpl.rc_context(STYLE | {"font.size": 9, "axes.titlesize": 9}):
        titles = _wrapped([line.label for line in series], 26)
        height = 1.6 + 0.15 * max(title.count("\n") for title in titles)
        figure = Figure(figsize=(2.05 * max(2, columns), height * rows + 0.5))
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for place, (axes, number) in enumerate(zip(grid, numbers, strict=False)):
            if reference is not None and number != reference:
                _band(axes, series[reference], reference, 0.0, ends, ":")
            _band(axes, series[number], number, 0.25, ends, "-")
            axes.set_title(titles[number], color=INK, pad=3)
            if mark is not None:
                mark(axes, series[number], COLOURS[number % len(COLOURS)])
            lowest = place + columns >= len(numbers)  # of its column
            _name(axes, x if lowest else "", "" if place % columns else y)
            axes.tick_params(labelbottom=lowest)
        for axes in grid[len(numbers) :]:
            axes.set_visible(False)
        grid[0].set_xscale(**({"value": "log"} if logarithmic else _scale(series)))
        if grid[0].get_xscale() != "linear":
            grid[0].xaxis.set_minor_locator(NullLocator())
        if logarithmic:  # a few values, often within one decade
            places = sorted({x for line in series for xs, _ in line.runs for x in xs})
            shown = places[:: -(-len(places) // 4)]
            grid[0].set_xticks(shown, [f"{place:g}" for place in shown])
        elif grid[0].get_xscale() == "log":
            grid[0].xaxis.set_major_locator(LogLocator(numticks=9))
        if reference is not None and len(numbers) > 1:
            colour = COLOURS[reference % len(COLOURS)]
            figure.legend(
                handles=[Line2D([], [], color=colour, linestyle=":", lw=1.8)],
                labels=[f"{titles[reference]}, in every picture"],
                loc="outside upper right",
            )
    return Chart(*caption, figure, broad=True)


def bars(caption: Caption, values: Mapping[str, float], x: str, y: str) -> Chart:
    """Draw a bar for each name."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure()
        axes.bar(range(len(values)), list(values.values()), color=COLOURS[0], width=0.8)
        step = -(-len(values) // 10)
        shown = [plain(name) for name in list(values)[::step]]
        slant: dict[str, Any] = {"rotation": 30, "ha": "right"} if sum(map(len, shown)) > 50 else {}
        axes.set_xticks(range(0, len(values), step), shown, **slant)
        axes.grid(visible=False, axis="x")
        _name(axes, x, y)
    return Chart(*caption, figure)


def boxes(caption: Caption, values: Mapping[str, Sequence[float]], y: str) -> Chart:
    """Draw a box plot of the values of each name."""
    with mpl.rc_context(STYLE):
        figure, axes = _figure(max(_WIDTH, len(values)))
        names = _wrapped([*values], max(12, _LEGEND_LETTERS // len(values)))
        artists = axes.boxplot(
            list(values.values()), tick_labels=names, patch_artist=True,
            medianprops={"color": INK}, whiskerprops={"color": INK}, capprops={"color": INK},
            boxprops={"edgecolor": INK}, flierprops={"markeredgecolor": INK, "markersize": 3},
        )  # fmt: skip
        for number, box in enumerate(artists["boxes"]):
            box.set_facecolor(COLOURS[number % len(COLOURS)])
        axes.tick_params(axis="x", labelsize=9)
        axes.set_ylabel(y)
    return Chart(*caption, figure, broad=figure.get_figwidth() > _WIDTH)


def points(
    caption: Caption, places: Sequence[str],
    values: Mapping[str, Sequence[tuple[float, float | None] | None]], y: str,
) -> Chart:  # fmt: skip
    """Draw for each name its value at each place, with an error bar of the given half width.

    The points of a place are side by side, in the order of the names; None omits a point.
    """
    spacing = 0.8 / len(values)
    with mpl.rc_context(STYLE):
        figure, axes = _figure(width=max(_WIDTH, 0.16 * len(values) * len(places)))
        for number, (label, cells) in enumerate(values.items()):
            shift = (number - (len(values) - 1) / 2) * spacing
            marks = [(place + shift, *cell) for place, cell in enumerate(cells) if cell is not None]
            at, means, halves = zip(*marks, strict=True)
            colour, _, shape = _look(number)
            style: dict[str, Any] = {"color": colour, "ms": 5, "lw": 1.2}
            errors = [half or 0.0 for half in halves]
            axes.errorbar(at, means, errors, fmt=shape, label=plain(label), **style)
        wrapped = [textwrap.fill(plain(place), 12) for place in places]
        axes.set_xticks(range(len(places)), wrapped, fontsize=9)
        axes.set_xlim(-0.5, len(places) - 0.5)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel(plain(y))
        _legend(figure, values)
    return Chart(*caption, figure, broad=figure.get_figwidth() > _WIDTH)


def differences(
    caption: Caption, intervals: Mapping[str, tuple[float, float]],
    ends: Mapping[str, tuple[float, float, float]], x: str, cost: str, y: str,
) -> Chart:  # fmt: skip
    """Draw the differences of rows to a reference, and beside them the final values by cost.

    `intervals`: a difference and half its interval; `ends`: a cost, a value and half its interval.
    """
    looks = {name: _look(number) for number, name in enumerate(ends)}
    styles = {name: {"color": colour, "fmt": shape} for name, (colour, _, shape) in looks.items()}
    with mpl.rc_context(STYLE | {"font.size": 9}):
        figure = Figure(figsize=(8.4, max(2.6, 0.3 * len(intervals) + 1.2)))
        left, right = figure.subplots(1, 2, width_ratios=(3, 2))
        left.axvline(0, color=_GREY, ls=":", lw=1.5)
        for place, (name, (middle, half)) in enumerate(intervals.items()):
            left.errorbar(middle, place, xerr=half, capsize=3, **styles[name])
        left.set_yticks(range(len(intervals)), [plain(name) for name in intervals])
        left.set_ylim(len(intervals) - 0.5, -0.5)
        left.grid(visible=False, axis="y")
        for name, (at, middle, half) in ends.items():
            right.errorbar(at, middle, half, label=plain(name), **styles[name])
        costs = [at for at, _, _ in ends.values()]
        if min(costs) > 0:  # a logarithmic axis would lack a row that sends nothing
            right.set_xscale("log")
            is_wide = max(costs) > 300 * min(costs)  # then labels at 2 and 5 would overlap
            right.xaxis.set_major_locator(LogLocator(subs=(1,) if is_wide else (1, 2, 5)))
            right.xaxis.set_major_formatter("{x:g}")
            right.xaxis.set_minor_locator(NullLocator())
        _name(left, x, "")
        _name(right, cost, y)
        _legend(figure, [plain(name) for name in ends])
    return Chart(*caption, figure, broad=True)


def heatmap(
    caption: Caption, values: ArrayLike, rows: Sequence[str], columns: Sequence[str], x: str,
    label: str, y: str = "", *, counts: Sequence[Sequence[int]] | None = None,
) -> Chart:  # fmt: skip
    """Draw a heat map with named rows and columns; of many names only some are written.

    In a small map each cell shows its number, or its count if there are `counts`.
    """
    table = np.asarray(values, float)
    top = float(table.max()) or 1.0
    rows, columns = (
        [plain(shorten(" ".join(name.split()), _NAME_LETTERS)) for name in names]
        for names in (rows, columns)
    )
    longest = max(map(len, columns))
    turned = longest > 3
    below = 0.06 * longest * turned  # inches
    width = min(11.0, max(_WIDTH, 0.35 * len(columns) + 2.2))
    with mpl.rc_context(STYLE):
        figure, axes = _figure(width, min(9.0, max(3.2, 0.32 * len(table) + 1.0) + below))
        axes.grid(visible=False)
        image = axes.imshow(
            table, vmin=0, vmax=top, aspect="auto", cmap="viridis", interpolation="nearest"
        )
        scale: Any = figure.colorbar(image, ax=axes, label=label)
        scale.outline.set_visible(False)
        down, across = max(1, -(-len(rows) // _MAX_NAMES)), -(-len(columns) // _MAX_NAMES)
        axes.set_yticks(range(0, len(rows), down), rows[::down], fontsize=10)
        rotation = 90 if turned else 0
        axes.set_xticks(range(0, len(columns), across), columns[::across], rotation=rotation)
        _name(axes, x, y)
        if len(columns) <= _MAX_IN_CELLS and len(table) <= _MAX_NAMES:
            numbers = np.asarray(table if counts is None else counts)
            integers = bool((numbers == numbers.round()).all())
            written = np.vectorize(lambda x: f"{x:.0f}" if integers else f"{x:.2g}")(numbers)
            widest = max(map(len, written.flat))
            size = 10 if len(columns) * widest <= 32 else 8 if len(columns) * widest <= 60 else 6
            for (row, column), value in np.ndenumerate(table):
                colour = "#ffffff" if value < 0.6 * top else "#000000"
                axes.text(
                    column, row, written[row, column], fontsize=size, color=colour, ha="center",
                    va="center",
                )  # fmt: skip
    return Chart(*caption, figure, broad=width > _WIDTH)


def _name(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(plain(x))
    axes.set_ylabel(plain(y))


def _figure(width: float = _WIDTH, height: float = _HEIGHT) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height))
    return figure, figure.add_subplot()
