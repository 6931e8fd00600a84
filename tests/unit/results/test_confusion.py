"""A confusion matrix is legible for two classes and for a hundred."""

from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from sklearn.metrics import confusion_matrix, recall_score

from ravan_flwr.results.run_charts import confusion_chart


def drawn(number, name="class"):
    """Draw predictions of which seven in ten are right."""
    random = np.random.default_rng(number)
    right = random.integers(0, number, 40 * number)
    wrong = random.random(len(right)) < 0.3
    predicted = np.where(wrong, random.integers(0, number, len(right)), right)
    counts = confusion_matrix(right, predicted, labels=range(number)).tolist()
    return counts, confusion_chart(counts, [f"{name} {i}" for i in range(number)])


@pytest.mark.parametrize("number", [2, 3, 10, 20])
def test_every_count_is_drawn_in_its_cell_in_a_legible_size(number):
    counts, chart = drawn(number)
    axes: Any = chart.figure.axes[0]
    canvas = FigureCanvasAgg(chart.figure)
    canvas.draw()
    shown = {(text.get_position()[::-1], text.get_text()) for text in axes.texts}
    assert shown == {
        ((row, column), str(count))
        for row, line in enumerate(counts)
        for column, count in enumerate(line)
    }
    renderer = canvas.get_renderer()
    cell = axes.transData.transform((1, 0))[0] - axes.transData.transform((0, 0))[0]
    for text in axes.texts:
        assert text.get_fontsize() >= 5
        assert text.get_window_extent(renderer).width < cell
    for names in (axes.get_xticklabels(), axes.get_yticklabels()):
        expected = [f"class {i}" for i in range(number)]
        assert [name.get_text() for name in names] == expected
        heights = [name.get_window_extent(renderer) for name in names]
        assert all(name.get_fontsize() >= 6 for name in names)
        assert min(min(box.width, box.height) for box in heights) < cell
    assert chart.broad == (number > 8)


def test_for_many_classes_colours_and_some_names_are_drawn():
    _, chart = drawn(100)
    axes: Any = chart.figure.axes[0]
    assert not axes.texts
    assert 20 <= len(axes.get_xticklabels()) <= 40
    assert chart.png()


def test_large_counts_are_not_shortened_and_long_names_keep_their_ends():
    words = ["encoder.block.0.layer.0.SelfAttention.q", "encoder.block.0.layer.0.SelfAttention.k"]
    chart = confusion_chart([[1234, 12], [7, 10500]], words)
    axes: Any = chart.figure.axes[0]
    assert {text.get_text() for text in axes.texts} == {"1234", "12", "7", "10500"}
    names = [name.get_text() for name in axes.get_yticklabels()]
    assert names == ["encoder.block.0….SelfAttention.q", "encoder.block.0….SelfAttention.k"]


def test_colours_are_fractions_of_a_class_with_its_answers_that_are_no_label():
    """Of ten examples a text-to-text model wrote one right label, and nine other texts."""
    (image,) = confusion_chart([[1, 0], [1, 9]], ["yes", "no"], [9, 0]).figure.axes[0].images
    recall = recall_score(["yes"] * 10 + ["no"] * 10, ["yes"] + ["?"] * 9 + ["yes"] + ["no"] * 9,
                          average=None, labels=["yes", "no"])  # fmt: skip
    np.testing.assert_allclose(np.diag(np.asarray(image.get_array())), recall)


@pytest.mark.slow
def test_names_of_any_form_are_drawn():
    counts = [[3, 1], [0, 2]]
    for name in ("$x_y^$", "中文", "a very long name " * 20, "two\nlines", "☃ \udce9", ""):
        chart = confusion_chart(counts, [name, "b"])
        assert chart.png()
        assert "<svg" in chart.svg()
    assert confusion_chart([[0, 0], [0, 0]], ["a", "b"]).png()  # without an example
