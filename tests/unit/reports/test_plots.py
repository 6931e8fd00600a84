"""Pictures of a live page: numbers in the right places, few, and none that is not finite."""

import math

import hypothesis
import hypothesis.strategies as st
import pytest

from ravan_flwr.reports.plots import (
    BOTTOM,
    LEFT,
    MOST_BARS,
    MOST_POINTS,
    RIGHT,
    TOP,
    bar_plot,
    line_plot,
)

NUMBERS = st.floats(allow_nan=True, allow_infinity=True) | st.floats(-1e3, 1e3)


def drawn(series, whole=False):
    return line_plot("x", "X", "about", "round", series, whole=whole)


@hypothesis.given(st.lists(st.tuples(NUMBERS, NUMBERS), max_size=50))
def test_whatever_the_numbers_all_points_are_inside(points):
    plot = drawn({"one": points})
    finite = [x for x in points if all(abs(part) < 1e300 for part in x)]
    assert (plot is None) == (not finite)
    if plot is None:
        return
    (line,) = plot.lines
    assert len(line.path.split()) == len(finite)
    for place in line.path.split():
        x, y = map(float, place.split(","))
        assert LEFT - 0.1 <= x <= RIGHT + 0.1
        assert TOP - 0.1 <= y <= BOTTOM + 0.1
    assert all(TOP - 0.1 <= y <= BOTTOM + 0.1 for y, _ in plot.y_ticks)


def test_places_follow_the_numbers():
    plot = drawn({"one": [(1, 0.0), (2, 0.5), (3, 1.0)]}, whole=True)
    assert plot is not None
    places = [tuple(map(float, place.split(","))) for place in plot.lines[0].path.split()]
    assert places == [(LEFT, BOTTOM), ((LEFT + RIGHT) / 2, (BOTTOM + TOP) / 2), (RIGHT, TOP)]
    assert [label for _, label in plot.x_ticks] == ["1", "2", "3"]
    assert [label for _, label in plot.y_ticks] == ["0", "0.2", "0.4", "0.6", "0.8", "1"]
    assert plot.parts == []  # one line needs no key


@pytest.mark.parametrize("value", [0.0, -3.0, 1e-12, 12_345.0, 5e-324, 1e299])
def test_one_point_is_a_picture(value):
    plot = drawn({"one": [(1, value)]}, whole=True)
    assert plot is not None
    assert len(plot.lines[0].dots) == 1


def test_long_runs_are_thinned_and_keep_their_last_point():
    plot = drawn({"one": [(n, math.sin(n)) for n in range(100_000)]})
    assert plot is not None
    assert len(plot.lines[0].path.split()) <= MOST_POINTS
    assert plot.lines[0].dots[-1][2].startswith("99999: ")


def test_bars_stand_on_each_other():
    plot = bar_plot("s", "S", "about", "round", [(1, (2.0, 1.0)), (2, (1.0, 1.0))], ("a", "b"))
    assert plot is not None
    first, second = plot.bars[:2]
    assert first.y + first.height == pytest.approx(BOTTOM)
    assert second.y + second.height == pytest.approx(first.y)
    assert first.height == pytest.approx(2 * second.height)
    many = bar_plot("s", "S", "", "round", [(n, (1.0, 1.0)) for n in range(500)], ("a", "b"))
    assert many is not None
    assert len(many.bars) == 2 * MOST_BARS
    assert bar_plot("s", "S", "", "round", [(1, (math.nan, math.inf))], ("a", "b")) is None
