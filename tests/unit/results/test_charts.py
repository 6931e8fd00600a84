"""Charts accept any values of a run, stay small, and need no style of the page."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import hypothesis
import hypothesis.strategies as st
import pytest

from ravan_flwr.results.charts import Caption, Series, boxes, differences, lines, panels, points
from ravan_flwr.results.run_charts import comparison_charts, run_charts
from ravan_flwr.runs.history import RecordedRun, group_runs
from tests.records import record

CAPTION = Caption("x", "X", "about")
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e3, 1e3)


@pytest.mark.slow
@hypothesis.settings(max_examples=30)
@hypothesis.given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20))
def test_a_line_is_drawn_of_the_finite_values(points):
    xs, ys = [x for x, _ in points], [y for _, y in points]
    chart = lines(CAPTION, [Series("one", [(xs, ys)])], "x", "y")
    finite = [(x, y) for x, y in points if abs(x) < 1e30 and abs(y) < 1e30]
    drawn: list[Any] = [line.get_xydata() for line in chart.figure.axes[0].lines]
    assert [len(line) for line in drawn] == ([len(finite)] if finite else [])
    ET.fromstring(chart.svg())


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 12_345.0, 5e-324, 1e29])
def test_one_point_is_drawn(value):
    chart = lines(CAPTION, [Series("one", [([1], [value])])], "round", "y")
    assert chart.figure.axes[0].lines[0].get_marker() == "o"
    ET.fromstring(chart.svg())


def test_charts_of_a_long_run_are_small_and_without_styles():
    """A style element of one chart would hold for the whole page: charts use attributes alone."""
    records: list[Any] = [record(number) for number in range(1, 1001)]
    config = {"method": "ravan", "preset": "p", "seed": 0, "num-clients": 5}
    run = RecordedRun(Path("a-run"), config, records, None)
    charts = [*comparison_charts(group_runs([run])), *run_charts(run)]
    for svg in (chart.svg() for chart in charts):
        assert len(svg) < 100_000
        assert "style" not in svg
        assert 'stroke="#0072b2"' in svg or 'fill="#0072b2"' in svg or "<image" in svg


@pytest.mark.parametrize("number", [2, 6, 12])
@pytest.mark.parametrize("letters", [2, 4, 5, 6, 9, 20, 40])
def test_the_names_of_every_legend_fit_the_picture(number, letters):
    names = [f"{n:x>{letters}}" for n in range(number)]
    ends = dict.fromkeys(names, (0.1, 0.2))
    costs = dict.fromkeys(names, (1.0, 0.5, 0.1))
    charts = [
        lines(CAPTION, [Series(name, [([1, 2], [3, 4])]) for name in names], "round", "y"),
        points(CAPTION, ["A", "B"], {name: [(0.1, 0.2)] * 2 for name in names}, "y"),
        differences(CAPTION, ends, costs, "x", "MB", "y"),
    ]
    for chart in charts:
        chart.svg()
        legend, whole = chart.figure.legends[0].get_window_extent(), chart.figure.bbox
        assert whole.x0 <= legend.x0 < legend.x1 <= whole.x1


@pytest.mark.parametrize("number", [2, 4, 6, 12])
@pytest.mark.filterwarnings("error")  # matplotlib's, of axes without room
def test_long_names_fit_the_picture_and_stay_distinct(number):
    names = [
        f"preset a-preset, {'num-rounds 30, lora-rank 4, ' * 12}seed {n}" for n in range(number)
    ]
    series = [Series(name, [([1, 2], [3, 4])]) for name in names]
    chart = lines(CAPTION, series, "round", "y")
    chart.svg()
    figure: Any = chart.figure
    (legend,) = figure.legends
    assert len({text.get_text() for text in legend.get_texts()}) == number
    extent, whole = legend.get_window_extent(), figure.bbox
    assert whole.x0 <= extent.x0
    assert extent.x1 <= whole.x1
    assert figure.axes[0].get_window_extent().height > whole.height / 5
    chart = boxes(CAPTION, {name: [1, 2] for name in names}, "y")
    chart.svg()
    assert len({text.get_text() for text in chart.figure.axes[0].get_xticklabels()}) == number
    chart = panels(CAPTION, series, "", "round", "y")
    chart.svg()
    assert len({axes.get_title() for axes in chart.figure.axes if axes.get_visible()}) == number
