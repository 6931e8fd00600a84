"""Charts accept any values of a run, stay small, and need no style of the page."""

from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import hypothesis
import hypothesis.strategies as st
import pytest

from ravan_flwr.reports.charts import Caption, Series, lines
from ravan_flwr.reports.run_charts import comparison_charts, run_charts
from ravan_flwr.runs.history import RecordedRun, group_runs
from tests.followed import record

CAPTION = Caption("x", "X", "about")
NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e3, 1e3)


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
    """The page's policy refuses style elements, so that charts use attributes alone."""
    records: list[Any] = [record(number) for number in range(1, 1001)]
    config = {"method": "ravan", "preset": "p", "seed": 0, "num-clients": 5}
    run = RecordedRun(Path("a-run"), config, records, None)
    charts = [*comparison_charts(group_runs([run])), *run_charts(run)]
    for svg in (chart.svg() for chart in charts):
        assert len(svg) < 100_000
        assert "style" not in svg
        assert 'stroke="#0072b2"' in svg or 'fill="#0072b2"' in svg or "<image" in svg
