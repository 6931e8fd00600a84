"""The charts of a study show every row, with intervals over the seeds."""

import numpy as np
import pytest
import yaml
from scipy import stats

from ravan_flwr.studies.choosing import table_runs
from ravan_flwr.studies.pictures import band_ends, charts
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import read_study
from ravan_flwr.studies.tables import table_lines
from tests.studies import fill, result

MANY = ("ravan", "fedit", "ffa-lora", "hetlora", "flexlora", "rolora", "flora", "fedsvd", "full")


def charts_of(
    tmp_path, rows, value_of=lambda s: 0.5 + s["seed"] % 10 / 100, as_metric="accuracy", **table
):
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2], "settings": {"num-rounds": 2},
        "choose": {"learning-rate": [1e-3, 3e-3], "seeds": [100, 101, 102], "extensions": 0},
        "tables": [
            {"title": "All, at once!", "rows": {name: {"method": name} for name in rows}} | table
        ],
    }  # fmt: skip
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study, results = read_study(path), Results(tmp_path)
    fill(study, results, value_of, as_metric)
    return {chart.name: chart for chart in charts(study.tables[0], results)}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [MANY[:2], MANY])
def test_a_table_has_four_charts_with_every_row(tmp_path, rows):
    found = charts_of(tmp_path, rows)
    names = ["accuracy", "accuracy-by-bytes", "accuracy-by-seconds", "accuracy-by-rate"]
    assert list(found) == [f"all-at-once-{name}" for name in names]
    for name, chart in found.items():
        assert chart.png().startswith(b"\x89PNG")
        shown = [axes for axes in chart.figure.axes if axes.get_visible()]
        if len(rows) > 6 or name.endswith("rate"):
            assert [axes.get_title() for axes in shown] == list(rows)
        else:
            legend = chart.figure.legends[0].get_texts()
            assert [text.get_text() for text in legend] == list(rows)
        assert "95 % intervals" in chart.about or "3 seeds" in chart.about


def test_planned_differences_are_drawn_with_intervals_and_bytes(tmp_path):
    def value(settings):
        better = settings["method"] == "ravan"
        return 0.5 + (settings["seed"] % 10) ** 2 / 100 + better * (1 + settings["seed"] % 10) / 100

    found = charts_of(tmp_path, MANY[:3], value, contrasts=["fedit"])
    left, right = found["all-at-once-accuracy-differences"].figure.axes
    assert [label.get_text() for label in left.get_yticklabels()] == ["fedit", "ffa-lora"]
    assert right.get_xscale() == "log"
    (low, high), *_ = left.collections[0].get_segments()
    theirs = stats.ttest_1samp([-1.0, -2.0, -3.0], 0).confidence_interval()
    assert (low[0], high[0]) == pytest.approx(tuple(theirs))
    assert "all-at-once-accuracy-differences" not in charts_of(tmp_path / "b", MANY[:3])


def test_planned_differences_of_perplexities_are_not_in_percent(tmp_path):
    def value(settings):
        return 2.0 + settings["seed"] % 10 / 100 + 1.5 * (settings["method"] == "fedit")

    found = charts_of(tmp_path, MANY[:2], value, as_metric="perplexity", contrasts=["fedit"])
    left, right = found["all-at-once-perplexity-differences"].figure.axes
    (low, high), *_ = left.collections[0].get_segments()
    assert (low[0], high[0]) == pytest.approx((1.5, 1.5))
    assert (left.get_xlabel(), right.get_ylabel()) == ("minus ravan, perplexity", "perplexity")


def test_without_run_directories_no_spectra_are_drawn(tmp_path):
    names = charts_of(tmp_path, MANY[:2], spectra=True)
    assert len(names) == 4
    assert not any("spectrum" in name for name in names)


def test_rows_evaluated_once_have_no_curve_by_round(tmp_path):
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2],
        "settings": {"learning-rate": 1e-3}, "tables": [{"title": "All", "rows": {"ravan": {}}}],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    study, results = read_study(path), Results(tmp_path)
    once = {"round": [2], "bytes": [3e6], "client-seconds": [8.0], "accuracy": [0.5]}
    for run in table_runs(study, results):
        results.add(run, result(0.5, curve=once))
    names = [chart.name for chart in charts(study.tables[0], results)]
    assert names == ["all-accuracy-by-bytes", "all-accuracy-by-seconds"]


def test_a_row_without_training_does_not_hide_other_curves(tmp_path):
    sent = {"ravan": [1e6, 2e6], "full": [3e7, 6e7], "none": [0.0]}  # bytes so far
    rows = {name: {"method": name, "num-rounds": len(points)} for name, points in sent.items()}
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2],
        "settings": {"learning-rate": 1e-3}, "tables": [{"title": "All", "rows": rows}],
    }  # fmt: skip
    tmp_path.mkdir(exist_ok=True)
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    study, results = read_study(path), Results(tmp_path)
    for run in table_runs(study, results):
        points = sent[str(dict(run.settings)["method"])]
        curve = {"round": [1, 2][: len(points)], "bytes": points, "client-seconds": points}
        results.add(run, result(0.5, curve=curve | {"accuracy": [0.4, 0.5][: len(points)]}))
    found = {chart.name: chart.figure.axes[0] for chart in charts(study.tables[0], results)}
    for axes in found.values():
        assert axes.get_legend_handles_labels()[1] == ["ravan", "full"]
    assert found["all-accuracy-by-bytes"].get_xscale() == "log"
    assert found["all-accuracy"].get_xscale() == "linear"


def test_the_chosen_rate_and_rates_within_noise_are_marked(tmp_path):
    values = {1e-3: [0.5, 0.51, 0.52], 3e-3: [0.9, 0.91, 0.92]}
    found = charts_of(
        tmp_path, ["ravan"], lambda s: values[s.get("learning-rate", 1e-3)][s["seed"] % 100]
    )
    (axes,) = [x for x in found["all-at-once-accuracy-by-rate"].figure.axes if x.get_visible()]
    points = {float(x.get_xdata()[0]): x for x in axes.get_lines() if len(x.get_xdata()) == 1}
    assert points[1e-3].get_markerfacecolor() == "white"
    assert points[3e-3].get_markerfacecolor() != "white"
    assert points[3e-3].get_markersize() > points[1e-3].get_markersize()
    assert axes.get_xscale() == "log"


def test_a_band_is_the_interval_of_the_mean():
    values = np.random.default_rng(0).normal(0.5, 0.1, (5, 3))
    low, high = band_ends(values)
    theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(low, theirs.low)
    np.testing.assert_allclose(high, theirs.high)
    low, high = band_ends(values[:2])
    np.testing.assert_array_equal(high, values[:2].max(0))


def test_before_any_run_there_is_no_chart(tmp_path):
    assert charts_of(tmp_path, ["ravan"], lambda _: None) == {}


def test_with_time_as_metric_the_tasks_metric_is_drawn_by_time(tmp_path):
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2],
        "settings": {"num-rounds": 2, "devices": "edge-gpus", "learning-rate": 1e-3},
        "tables": [{"title": "T", "metric": "time", "rows": {"ravan": {}}}],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    study, results = read_study(path), Results(tmp_path)
    for run in table_runs(study, results):
        one = result(0.5)
        more = {"final": one.final | {"time": 5.0}, "curve": one.curve | {"time": [2.0, 5.0]}}
        results.add(run, one.model_copy(update=more))
    found = {chart.name: chart for chart in charts(study.tables[0], results)}
    (axes,) = found["t-accuracy-by-time"].figure.axes
    assert np.asarray(axes.lines[0].get_xdata()).tolist() == [2.0, 5.0]
    assert table_lines(study.tables[0], results)[0].startswith("|  | time, s | by seed |")
    assert "5.000 ± 0.000" in table_lines(study.tables[0], results)[2]


def test_a_row_with_a_run_short_of_its_target_is_named_below_the_table(tmp_path):
    content = {
        "title": "A study", "num-clients": 3, "seeds": [0, 1, 2],
        "settings": {"num-rounds": 2, "devices": "edge-gpus", "learning-rate": 1e-3},
        "tables": [{"title": "T", "metric": "time", "against": "ravan", "rows": {
            "ravan": {}, "slow": {"local-steps": 1}}}],
    }  # fmt: skip
    path = tmp_path / "study.yaml"
    path.write_text(yaml.safe_dump(content))
    study, results = read_study(path), Results(tmp_path)
    table, note = study.tables[0], "Without a time, since runs ended before they reached the target"
    for number, run in enumerate(table_runs(study, results)):
        one = result(0.5)
        misses = "local-steps=1" in str(run) and "seed=2" in str(run)
        more = {"final": one.final | ({} if misses else {"time": 5.0 + number})}
        more["curve"] = one.curve | {"time": [2.0, 5.0]}
        results.add(run, one.model_copy(update=more))
    lines = table_lines(table, results)
    assert lines[-1] == f"{note}: slow (1 of 3 runs)."
    assert not any("| slow |" in line for line in lines)
    (charts_of,) = (chart for chart in charts(table, results) if chart.name == "t-accuracy-by-time")
    assert len(charts_of.figure.axes[0].lines) == 1
