"""Draw many lines so that each can be seen: a small picture for each, beside one that is in all."""

from collections.abc import Callable, Sequence

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import LogLocator, NullLocator

from ravan_flwr.reports.chart import COLOURS, INK, STYLE, Chart, plain
from ravan_flwr.reports.charts import Ends, Series, band, ends_far_apart, least_and_greatest

COLUMNS = 4  # at most
_WIDTH, _HEIGHT = 2.05, 1.6  # of a panel, in inches
_GREY = "#7F7F7F"


def panels(
    name: str,
    title: str,
    about: str,
    series: Sequence[Series],
    against: str,
    x: str,
    y: str,
    *,
    ends: Ends = least_and_greatest,
    logarithmic: bool | None = None,
    mark: Callable[[Axes, Series], None] | None = None,
) -> Chart:
    """Draw a panel for each series, with its band; that named `against` is in grey in each.

    `mark` adds what is particular to a panel. `logarithmic` None: where lines end far apart.
    """
    columns = min(COLUMNS, len(series))
    rows = -(-len(series) // columns)
    other = next((one for one in series if one.label == against), None)
    with mpl.rc_context(STYLE | {"font.size": 9, "axes.titlesize": 9}):
        figure = Figure(figsize=(max(2, columns) * _WIDTH, rows * _HEIGHT + 0.5))
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False).flatten()
        for number, (axes, one) in enumerate(zip(grid, series, strict=False)):
            if other is not None and one is not other:
                line = Series(plain(against), other.runs)
                band(axes, line, _GREY, ":", 0.0, ends)
            band(axes, one, COLOURS[0], "-", 0.25, ends)
            axes.set_title(plain(one.label), color=INK, pad=3)
            if mark is not None:
                mark(axes, one)
            _label(axes, x, y, first=number % columns == 0, last=number + columns >= len(series))
        for axes in grid[len(series) :]:
            axes.set_visible(False)
        if ends_far_apart(series) if logarithmic is None else logarithmic:
            grid[0].set_xscale("log")
            grid[0].xaxis.set_major_locator(LogLocator(numticks=9))
            grid[0].xaxis.set_minor_locator(NullLocator())
        if other is not None and len(series) > 1:
            figure.legend(
                handles=[Line2D([], [], color=_GREY, linestyle=":", lw=1.8)],
                labels=[f"{plain(against)}, in every picture"],
                loc="outside upper right",
            )
    return Chart(name, title, about, figure, broad=True)


def _label(axes: Axes, x: str, y: str, *, first: bool, last: bool) -> None:
    """Name the axes of a panel at the left, and of one with none below it."""
    if first:
        axes.set_ylabel(plain(y))
    if last:
        axes.set_xlabel(plain(x))
        axes.tick_params(labelbottom=True)
