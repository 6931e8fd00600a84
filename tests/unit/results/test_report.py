"""Layer names are short and unique; axes of fractions end at one; a run has one colour."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ravan_flwr.results.charts import Caption, Series, lines
from ravan_flwr.results.run_charts import comparison_charts, short_names
from ravan_flwr.runs.history import RecordedRun, group_runs
from tests.records import record


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


def run_of(rounds, **changes):
    """Return a run of so many rounds, each with `changes`."""
    changes |= {"link-bytes-estimate": 1}
    records: list[Any] = [record(n, time=2.0 * n, **changes) for n in range(1, rounds + 1)]
    config = {"method": "ravan", "preset": "digits-vit", "seed": 0, "num-rounds": rounds}
    return RecordedRun(Path(f"run-of-{rounds}"), config, records, None)


@pytest.mark.parametrize("number", [3, 9])  # in one picture, and in a panel each
def test_a_run_has_one_colour_in_all_charts_and_a_single_value_is_a_point(number):
    runs = [run_of(1), run_of(2, metrics={}), *map(run_of, range(3, 10))][:number]
    groups = group_runs(runs)
    assert len(groups) == number
    colours: dict[str, set[Any]] = {name: set() for name in groups}
    charts = {chart.name: chart for chart in comparison_charts(groups)}
    assert [*charts] == ["accuracy", "accuracy-by-bytes", "accuracy-by-time", "loss", "train-loss"]
    for name, chart in charts.items():
        markers = {}
        for line in (line for axes in chart.figure.axes for line in axes.lines):
            label = str(line.get_label())
            colours[label].add(line.get_color())
            markers[label] = line.get_marker()
        unmeasured = {"num-rounds 2"} if name != "train-loss" else set()
        assert markers.keys() == groups.keys() - unmeasured
        points = {label for label, marker in markers.items() if marker == "o"}
        assert points == {"num-rounds 1"}
        if number == 3:
            (legend,) = chart.figure.legends
            assert [text.get_text() for text in legend.get_texts()] == [*markers]
    assert charts["train-loss"].figure.axes[0].get_ylim()[1] > 2.5
    assert all(len(found) == 1 for found in colours.values())
    assert len({*map(str, colours.values())}) == min(number, 8)


def test_more_lines_than_colours_differ_in_their_dashes():
    series = [Series(str(number), [([1, 2], [number, 1])]) for number in range(32)]
    drawn = lines(Caption("many", "", ""), series, "x", "y").figure.axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in drawn}) == 32


def test_runs_with_other_numbers_of_clients_are_no_seeds_of_one_run():
    runs = [run_of(3), run_of(3), run_of(3)]
    for run, method, clients in zip(runs, ("ravan", "fedit", "fedit"), (20, 4, 8), strict=True):
        run.config.update({"method": method, "num-clients": clients})
    names = ["ravan, num-clients 20", "fedit, num-clients 4", "fedit, num-clients 8"]
    assert [*group_runs(runs)] == names


def test_a_long_name_has_no_settings_that_the_others_determine():
    runs = [run_of(3) for _ in range(4)]
    for number, run in enumerate(runs):
        run.config.update({"heads": number, "local-steps": 5 * number, "init": "x" * 20 * number})
    assert [*group_runs(runs[:3])][2] == f"heads 2, local-steps 10, init {'x' * 40}"
    assert [*group_runs(runs)] == [f"heads {n}, local-steps {5 * n}" for n in range(4)]


def test_the_axis_of_a_single_value_is_not_a_part_of_a_round():
    (axes,) = comparison_charts(group_runs([run_of(1)]))[0].figure.axes
    assert axes.get_xlim() == (0, 2)


def test_an_empty_setting_is_left_out_of_a_name():
    runs = [run_of(3), run_of(3), run_of(3)]
    for run, name, revision in zip(runs, "abb", ["", "", "main"], strict=True):
        run.config["model"] = {"name": name, "revision": revision}
    names = ["model.name a", "model.name b", "model.name b, model.revision main"]
    assert [*group_runs(runs)] == names


def test_a_point_where_nothing_was_sent_stays_on_the_axis_beside_a_long_line():
    runs = [run_of(1, **{"bytes-up": 0, "bytes-down": 0}), run_of(2), run_of(99)]
    charts = {chart.name: chart for chart in comparison_charts(group_runs(runs))}
    (axes,) = charts["accuracy-by-bytes"].figure.axes
    assert axes.get_xscale() == "symlog"
    assert axes.get_xlim()[0] < 0 == np.asarray(axes.lines[0].get_xdata()).item()


@pytest.mark.parametrize("number", [3, 6])
def test_long_settings_leave_two_thirds_of_a_chart_to_its_lines(number):
    runs = []
    for n in range(number):
        run = run_of(3)
        data = {"source": "hub", "name": f"/home/{'a-long-folder/' * 9}{n}", "labels": ["x" * 99]}
        texts = {f"key-{k}": f"{n} {'value ' * 9}" for k in range(number)}
        run.config.update({"data": data, **texts})
        runs.append(run)
    groups = group_runs(runs)
    assert len(groups) == number
    for n, name in enumerate(groups):
        values = name.split(", ")
        assert values[0].startswith("data.name /home/")
        assert values[0].endswith(f"/{n}")
        assert max(map(len, values)) < 50
    for chart in comparison_charts(groups):
        chart.svg()  # which lays it out
        (legend,) = chart.figure.legends
        assert legend.get_window_extent().height < chart.figure.bbox.height / 3
        assert len({text.get_text() for text in legend.get_texts()}) == number
