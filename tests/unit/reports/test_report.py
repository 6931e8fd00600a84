"""Layer names in a report are short and unique; its charts support many clients."""

from pathlib import Path
from typing import Any

import pytest

from ravan_flwr.reports.run_charts import comparison_charts, run_charts, short_names
from ravan_flwr.runs.history import RecordedRun, group_runs
from tests.followed import client, record


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (
            ["vit.layers.0.attention.q_proj", "vit.layers.10.attention.v_proj"],
            ["0.attention.q_proj", "10.attention.v_proj"],
        ),
        (["model.layers.3.q_proj", "model.layers.3.v_proj"], ["q_proj", "v_proj"]),
        (["encoder.0.q.linear", "encoder.extra.0.q.linear"], ["encoder.0.q.linear", "extra"]),
        (["decoder.0.q", "encoder.0.self.q"], ["decoder.0", "encoder.0.self"]),
        (["a.b", "a.b.c"], ["a.b", "c"]),
        (["alone.in.the.model"], ["alone.in.the.model"]),
        ([], []),
    ],
)
def test_words_common_to_all_names_are_removed(names, short):
    assert short_names(names) == short


def participation(clients, rounds):
    """Return the bars by their names, for a run of this many clients, with these participants."""
    records: list[Any] = [
        record(number, clients=[client(partition) for partition in partitions])
        for number, partitions in enumerate(rounds, start=1)
    ]
    run = RecordedRun(Path("a-run"), {"num-clients": clients}, records, None)
    charts: dict[str, Any] = {chart.name: chart for chart in run_charts(run)}
    (axes,) = charts["participation"].figure.axes
    return charts["participation"], axes, [patch.get_height() for patch in axes.patches]


@pytest.mark.parametrize("clients", [100, 1_000, 10_000, 1_000_000])
def test_a_bar_counts_the_clients_with_as_many_rounds(clients):
    chart, axes, heights = participation(clients, [[0, 7], [7, 99], [7, 50, 51]])
    assert heights == [clients - 5, 4, 0, 1]
    assert f"{clients:,} clients" in chart.about
    labels = [text.get_text() for text in axes.texts]
    assert labels == [f"{clients - 5:,}", "4", "0", "1"]
    assert axes.get_yscale() == "log"
    assert "logarithmic" in chart.svg()


def test_equal_participation_draws_visible_bars():
    _, axes, heights = participation(120, [range(120)] * 3)
    assert heights == [0, 0, 0, 120]
    assert axes.get_yscale() == "linear"


def test_many_numbers_of_rounds_share_bars():
    _, axes, heights = participation(500, [[0]] * 130)
    assert {at: height for at, height in enumerate(heights) if height} == {0: 499, 65: 1}
    assert "to a bar" in axes.get_xlabel()


def test_disconnected_participants_are_counted():
    _, _, heights = participation(2, [range(150), [3]])
    assert heights == [0, 149, 1]


@pytest.mark.parametrize(("metric", "values", "end"), [
    ("accuracy", [0.2, 0.97], 1.0), ("accuracy", [0.2, 1.0], 1.0), ("accuracy", [0.1, 0.3], 0.31),
    ("perplexity", [3.0, 2.0], 3.05),
])  # fmt: skip
def test_an_axis_of_fractions_ends_at_one_and_others_at_the_data(metric, values, end):
    records: list[Any] = [
        record(number, metrics={metric: value}) for number, value in enumerate(values, start=1)
    ]
    config = {"method": "ravan", "preset": "digits-vit", "seed": 0}
    run = RecordedRun(Path("a-run"), config, records, None)
    charts = {chart.name: chart for chart in comparison_charts(group_runs([run]))}
    for name in (metric, f"{metric}-by-bytes"):
        (axes,) = charts[name].figure.axes
        assert axes.get_ylim()[1] == pytest.approx(end)
