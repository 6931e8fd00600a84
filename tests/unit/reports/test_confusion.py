"""A confusion matrix is legible for two classes and for a hundred; a PNG says whose it is."""

import csv
import io
from typing import Any

import matplotlib.image
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from sklearn.metrics import confusion_matrix

from ravan_flwr.reports.charts import Caption, confusion, lines
from ravan_flwr.reports.run_charts import confusion_csv

CAPTION = Caption("c", "t", "about")


def picture(counts, labels):
    return confusion(CAPTION, counts, labels, confusion_csv(counts, labels))


def drawn(number, name="class"):
    """The picture of predictions that are right seven times out of ten."""
    random = np.random.default_rng(number)
    right = random.integers(0, number, 40 * number)
    wrong = random.random(len(right)) < 0.3
    predicted = np.where(wrong, random.integers(0, number, len(right)), right)
    counts = confusion_matrix(right, predicted, labels=range(number)).tolist()
    return counts, picture(counts, [f"{name} {i}" for i in range(number)])


@pytest.mark.parametrize("number", [2, 3, 10, 21, 100])
def test_every_count_is_in_its_cell_and_large_enough(number):
    counts, chart = drawn(number)
    axes: Any = chart.figure.axes[0]
    canvas = FigureCanvasAgg(chart.figure)
    canvas.draw()
    shown = {(text.get_position()[::-1], text.get_text()) for text in axes.texts}
    assert shown == {
        ((row, column), str(count))
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
        if count
    }
    renderer = canvas.get_renderer()
    cell = axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]
    for text in axes.texts:
        assert text.get_fontsize() >= 5
        assert text.get_window_extent(renderer).width < cell
    sides = 2 if number > 20 else 1  # of a large table both
    for names in (axes.get_xticklabels(), axes.get_yticklabels()):
        expected = [f"class {i}" for i in range(number)] * sides
        assert [name.get_text() for name in names] == expected
        heights = [name.get_window_extent(renderer) for name in names]
        assert all(name.get_fontsize() >= 6 for name in names)
        assert min(min(box.width, box.height) for box in heights) < cell
    assert chart.broad == (number > 10)


def test_names_of_any_form_are_drawn():
    counts = [[3, 1], [0, 2]]
    for name in ("$x_y^$", "中文", "a very long name " * 20, "two\nlines", "☃ \udce9", ""):
        chart = picture(counts, [name, "b"])
        assert chart.png(name)
        assert "<svg" in chart.svg()


def test_classes_without_an_example_are_drawn_empty():
    chart = picture([[0, 0], [0, 0]], ["a", "b"])
    assert not chart.figure.axes[0].texts
    assert chart.png()


def test_the_numbers_are_a_table():
    counts, chart = drawn(4, 'a "name", with')
    first, *rows = csv.reader(io.StringIO(chart.numbers.decode(), newline=""))
    assert first[1:] == [row[0] for row in rows] == [f'a "name", with {i}' for i in range(4)]
    assert [[int(cell) for cell in row[1:]] for row in rows] == counts
    assert confusion_csv([[1]], ["\udce9"])


def test_a_png_says_whose_it_is_and_a_page_does_not_say_it_twice():
    chart = lines(CAPTION, [], x="round", y="accuracy")
    plain, before = chart.png(), chart.svg()
    told = chart.png("digits-vit, ravan, seed 0: a-run-of-$mine$")
    assert told != plain
    assert chart.svg() == before
    assert "a-run-of" not in chart.svg()
    assert chart.png() == plain
    last = matplotlib.image.imread(io.BytesIO(told))[-25:, :, :3]
    assert last.min() < 0.5
    assert matplotlib.image.imread(io.BytesIO(plain))[-4:].min() > 0.99


def test_a_long_line_below_a_png_is_broken(recwarn):
    chart = lines(CAPTION, [], x="round", y="accuracy")
    picture = matplotlib.image.imread(io.BytesIO(chart.png("a-name " * 60)))
    assert picture[:, :4, :3].min() == 1  # nothing is cut off at its left edge
