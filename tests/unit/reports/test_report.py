"""Layer names in a report are short and unique; axes of fractions end at one."""

from pathlib import Path
from typing import Any

import pytest

from ravan_flwr.reports.run_charts import comparison_charts, short_names
from ravan_flwr.runs.history import RecordedRun, group_runs
from tests.followed import record


@pytest.mark.parametrize(
    ("names", "short"),
    [
        (
            ["vit.layers.0.attention.q_proj", "vit.layers.10.attention.v_proj"],
            ["0.attention.q_proj", "10.attention.v_proj"],
        ),
        (["model.layers.3.q_proj", "model.layers.3.v_proj"], ["q_proj", "v_proj"]),
        (["encoder.0.q.linear", "encoder.extra.0.q.linear"], ["0", "extra.0"]),
        (["decoder.0.q", "encoder.0.self.q"], ["decoder.0", "encoder.0.self"]),
        (["a.b", "a.b.c"], ["b", "b.c"]),
        (["alone.in.the.model"], ["model"]),
        ([], []),
    ],
)
def test_words_common_to_all_names_are_removed(names, short):
    assert short_names(names) == short


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
