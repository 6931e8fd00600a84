"""Draw the results of a study: a metric by round, by bytes, by seconds, and by learning rate."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes

from ravan_flwr.lab.choosing import RateChoice, choose_all, list_runs
from ravan_flwr.lab.lines import Line, compare_rows
from ravan_flwr.lab.results import Results, interval
from ravan_flwr.lab.spec import MIN_SEEDS, OVERVIEW, RATE, Study, Table
from ravan_flwr.results.charts import (
    STYLE,
    Caption,
    Chart,
    Series,
    differences,
    min_and_max,
    panels,
    points,
)
from ravan_flwr.results.run_charts import metric_charts
from ravan_flwr.results.spectrum import Spectra
from ravan_flwr.results.spectrum import charts as spectrum_charts
from ravan_flwr.runs.console import count
from ravan_flwr.tasks import TIME, is_fraction


def charts(table: Table, results: Results) -> list[Chart]:
    """Return a table's charts, and its rows' spectra if the table has `spectra`."""
    rows = compare_rows(table, results)
    pictures = [*_planned(table, rows), *(_courses(table, rows) if rows else ())]
    pictures += _sensitivity(table, results)
    if table.spectra:  # of the runs whose directories exist
        folder = results.folder
        paths = {
            name: [path for run in list_runs(row, results) if (path := run.directory(folder))]
            for name, row in table.rows.items()
        }
        if spectra := {name: [*map(Spectra.of, runs)] for name, runs in paths.items() if runs}:
            pictures += spectrum_charts(spectra, top=64)
    return [replace(chart, name=f"{table.file_name}-{chart.name}") for chart in pictures]


def overview_charts(study: Study, results: Results) -> list[Chart]:
    """Return a chart of each row's final metric in each table, as points with intervals."""
    tables = {table.title: compare_rows(table, results) for table in study.tables}
    tables = {title: lines for title, lines in tables.items() if lines}
    names = list(dict.fromkeys(line.row for lines in tables.values() for line in lines))
    metrics = {line.metric for lines in tables.values() for line in lines}
    if len(metrics) != 1:
        return []  # no run is done, or the tables have different metrics
    metric = metrics.pop()
    ends = [
        {x.row: (x.interval.mean, x.interval.half_width) for x in rows} for rows in tables.values()
    ]
    values = {name: [end.get(name) for end in ends] for name in names}
    or_mean = ", or its mean over the last evaluations where the table shows that"
    or_mean *= any(table.mean_of_last for table in study.tables)
    about = f"The {metric} after the last round{or_mean}, by table. "
    about += "Bars: 95 % intervals of the mean."
    title = f"{metric.capitalize()} by table"
    caption = Caption(f"{OVERVIEW}-{metric}", title, about)
    return [points(caption, list(tables), values, metric)]


def band_ends(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ends of the mean's 95 % interval; with too few seeds, least and greatest."""
    if len(values) < MIN_SEEDS:
        return min_and_max(values)
    intervals = [interval([float(value) for value in column]) for column in values.T]
    halves = np.asarray([interval.half_width for interval in intervals], float)
    return values.mean(0) - halves, values.mean(0) + halves


def _planned(table: Table, rows: Sequence[Line]) -> list[Chart]:
    """Return a chart of differences and final metrics by bytes, if the table has contrasts."""
    if not table.contrasts or not rows:
        return []
    metric, against = rows[0].metric, table.against
    scale, in_points, unit = (100, "points", "%") if is_fraction(metric) else (1, metric, metric)
    values = {
        row.row: (scale * row.difference.mean, scale * row.difference.half_width)
        for row in rows
        if row.difference and row.difference.half_width is not None
    }
    if not values:
        return []
    ends = {
        row.row: (
            statistics.mean((x.bytes_up + x.bytes_down) / 1e6 for x in row.results.values()),
            scale * row.interval.mean,
            scale * (row.interval.half_width or 0),
        )
        for row in rows
    }
    caption = Caption(
        f"{metric}-differences",
        f"Differences to {against}",
        f"Left: {metric} minus that of {against}, paired by seed. Right: {metric} by the "
        "megabytes that all clients sent and got. Bars: 95 % intervals.",
    )
    return [
        differences(caption, values, ends, f"minus {against}, {in_points}", "MB, up and down", unit)
    ]


def _courses(table: Table, rows: Sequence[Line]) -> list[Chart]:
    """Return charts of the metric by round, bytes, client seconds and time, if recorded.

    Rows that were evaluated once are drawn if there are no others: the table has their values.
    """
    metric = rows[0].first.metric if rows[0].metric == TIME else rows[0].metric
    curves = {row.row: [result.curve for result in row.results.values()] for row in rows}
    moving = {row: xs for row, xs in curves.items() if any(len(x["round"]) > 1 for x in xs)}
    keys = ["round"] if moving else []
    keys.append("bytes")
    if all(row.average("client_seconds") is not None for row in rows):
        keys.append("client-seconds")
    if all(TIME in curve for row_curves in curves.values() for curve in row_curves):
        keys.append(TIME)
    bands = f" {_band_caption(rows)}"
    options: dict[str, Any] = {"against": table.against, "ends": band_ends, "bands": bands}
    return metric_charts(metric, moving or curves, keys, **options)


def _band_caption(rows: Sequence[Line]) -> str:
    numbers = [len(row.values) for row in rows]  # they differ while runs are missing
    fewest, most = min(numbers), max(numbers)
    if most == 1:
        return "One seed."
    seeds = f"{most} seeds" if fewest == most else f"{fewest} to {most} seeds"
    if fewest >= MIN_SEEDS:
        return f"Bands: 95 % intervals of the mean over {seeds}."
    if most < MIN_SEEDS:
        return f"Bands: from the least to the greatest over {seeds}."
    return (
        f"Bands over {seeds}: 95 % intervals of the mean; of fewer than {MIN_SEEDS} seeds from the "
        "least to the greatest."
    )


def _sensitivity(table: Table, results: Results) -> list[Chart]:
    """Return a chart of the metric by rate, a panel for each row whose rate is chosen."""
    choices = choose_all(table, results)
    if not choices:
        return []
    scores = next(iter(choices.values())).scores
    metric = next(iter(scores.values())).metric
    name = table.chosen_key_name
    seeds = {len(score.values) for choice in choices.values() for score in choice.scores.values()}

    def mark(axes: Axes, series: Series, colour: str) -> None:
        """Mark the rates that were tried: filled if as good as the best, large if the best."""
        choice = choices[series.label]
        with mpl.rc_context(STYLE):
            for rate, score in choice.scores.items():
                face = colour if rate in choice.within_noise else "white"
                colours: dict[str, Any] = {"markerfacecolor": face, "markeredgecolor": colour}
                size = 7 if rate == choice.rate else 4
                axes.plot([rate], [score.mean], marker="o", markersize=size, **colours)

    examples, large = "the validation split of clients", "the one that was chosen"
    if table.leave_one_seed_out:
        examples = "examples that no client trains on"
        large = "the best over all seeds, and each seed took the best over the others"
    filled = "; filled points are not significantly different from it" * (min(seeds) >= MIN_SEEDS)
    caption = Caption(
        f"{metric}-by-{'rate' if table.chosen_key == RATE else table.chosen_key}",
        f"{metric.capitalize()} by {name}",
        f"The {metric} on {examples}, by {name}; {count(min(seeds), 'seed')}. The large point is "
        f"{large}{filled}.",
    )
    series = [_by_rate(name, choice) for name, choice in choices.items()]
    options: dict[str, Any] = {"ends": band_ends, "logarithmic": True, "mark": mark}
    return [panels(caption, series, table.against, name, metric, **options)]


def _by_rate(name: str, choice: RateChoice) -> Series:
    rates = sorted(choice.scores)
    seeds = range(len(choice.scores[rates[0]].values))
    return Series(name, [(rates, [choice.scores[rate].values[n] for rate in rates]) for n in seeds])
