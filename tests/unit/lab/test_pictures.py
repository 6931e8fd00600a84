"""The charts of a study show every row, with intervals over the seeds."""

from typing import Any

import numpy as np
import pytest
from scipy import stats

from ravan_flwr.lab.choosing import table_runs
from ravan_flwr.lab.pictures import band_ends, charts
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.tables import draw_pictures, table_lines
from ravan_flwr.results.charts import Caption, differences
from tests.studies import fill, result
from tests.unit.lab.written import study_of

MANY = ("ravan", "fedit", "ffa-lora", "hetlora", "flexlora", "rolora", "flora", "fedsvd", "full")


def charts_of(
    tmp_path, rows, value_of=lambda s: 0.5 + s["seed"] % 10 / 100, as_metric="accuracy", **table
):
    rows = {name: {"method": name} for name in rows}
    choose = {"learning-rate": [1e-3, 3e-3], "seeds": [100, 101, 102], "extensions": 0}
    tables = [{"title": "All, at once!", "rows": rows} | table]
    study, results = study_of(tmp_path, choose=choose, tables=tables), Results(tmp_path)
    fill(study, results, value_of, as_metric)
    return {chart.name: chart for chart in charts(study.tables[0], results)}


def done(tmp_path, changes_of, rows, metric="accuracy", **settings):
    """Return a table and its results, which `changes_of` changes by the number of the run."""
    table = {"title": "All", "metric": metric, "against": next(iter(rows)), "rows": rows}
    settings |= {"num-rounds": 2, "learning-rate": 1e-3}
    study, results = study_of(tmp_path, settings=settings, tables=[table]), Results(tmp_path)
    for number, run in enumerate(table_runs(study, results)):
        results.add(run, result(0.5).model_copy(update=changes_of(run, number)))
    return study.tables[0], results


def axes_of(table, results):
    return {chart.name: chart.figure.axes[0] for chart in charts(table, results)}


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


@pytest.mark.parametrize(("costs", "scale"), [((5.0, 40.0), "log"), ((0.0, 40.0), "linear")])
def test_a_row_that_sends_nothing_is_drawn_beside_the_others(costs, scale):
    ends = {name: (at, 0.5, 0.1) for name, at in zip(("none", "ravan"), costs, strict=True)}
    chart = differences(Caption("a", "b", "c"), {"none": (0.1, 0.2)}, ends, "x", "MB", "y")
    _, right = chart.figure.axes
    assert right.get_xscale() == scale
    low, high = right.get_xlim()
    assert all(low <= cost <= high for cost in costs)


def test_planned_differences_of_perplexities_are_not_in_percent(tmp_path):
    def value(settings):
        return 2.0 + settings["seed"] % 10 / 100 + 1.5 * (settings["method"] == "fedit")

    found = charts_of(tmp_path, MANY[:2], value, as_metric="perplexity", contrasts=["fedit"])
    left, right = found["all-at-once-perplexity-differences"].figure.axes
    (low, high), *_ = left.collections[0].get_segments()
    assert (low[0], high[0]) == pytest.approx((1.5, 1.5))
    assert (left.get_xlabel(), right.get_ylabel()) == ("minus ravan, perplexity", "perplexity")


def test_without_run_directories_no_spectra_are_drawn_and_before_any_run_nothing(tmp_path):
    names = charts_of(tmp_path, MANY[:2], spectra=True)
    assert len(names) == 4
    assert not any("spectrum" in name for name in names)
    assert charts_of(tmp_path / "new", ["ravan"], lambda _: None) == {}


@pytest.mark.parametrize("titles", [("图像", "文本"), ("x" * 90, "é" * 90)])
def test_every_table_has_pictures_of_its_own(tmp_path, titles):
    tables = [{"title": title, "rows": {"ravan": {}}} for title in titles]
    study, results = study_of(tmp_path, tables=tables), Results(tmp_path)
    fill(study, results, lambda settings: 0.5)
    pictures = draw_pictures(study, results)
    names = [chart.name for title in titles for chart in pictures[title]]
    assert len(set(names)) == len(names) == 6
    assert max(len(f"{name}.png".encode()) for name in names) < 200


def test_rows_evaluated_once_have_no_curve_by_round(tmp_path):
    once = {"round": [2], "bytes": [3e6], "client-seconds": [8.0], "accuracy": [0.5]}
    drawn = axes_of(*done(tmp_path, lambda *_: {"curve": once}, {"ravan": {}}))
    assert [*drawn] == ["all-accuracy-by-bytes", "all-accuracy-by-seconds"]


def test_a_row_without_training_does_not_hide_other_curves(tmp_path):
    sent = {"ravan": [1e6, 2e6], "full": [3e7, 6e7], "none": [0.0]}  # bytes so far
    rows = {name: {"method": name, "num-rounds": len(points)} for name, points in sent.items()}

    def curve(run, _):
        points = sent[str(dict(run.settings)["method"])]
        curve: dict[str, Any] = {"round": [1, 2], "bytes": points, "client-seconds": points}
        curve["accuracy"] = [0.4, 0.5]
        return {"curve": {name: values[: len(points)] for name, values in curve.items()}}

    drawn = axes_of(*done(tmp_path, curve, rows))
    for axes in drawn.values():
        assert axes.get_legend_handles_labels()[1] == ["ravan", "full"]
    assert drawn["all-accuracy-by-bytes"].get_xscale() == "log"
    assert drawn["all-accuracy"].get_xscale() == "linear"


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


@pytest.mark.parametrize(("seeds", "each", "words"), [
    ([100, 101, 102], False, "3 seeds. The large point is the one that was chosen; filled points"),
    ([100], False, "1 seed. The large point is the one that was chosen."),
    ([], True, "The large point is the best over all seeds, and each seed took the best over"),
])  # fmt: skip
def test_a_caption_says_how_rates_were_chosen(tmp_path, seeds, each, words):
    choose = {"learning-rate": [1e-3, 3e-3], "seeds": seeds, "extensions": 0}
    table = {"title": "T", "rows": {"ravan": {}}, "leave-one-seed-out": each}
    study, results = study_of(tmp_path, choose=choose, tables=[table]), Results(tmp_path)
    fill(study, results, lambda s: 0.5 + s["seed"] % 10 / 100)
    captions = {chart.name: chart.about for chart in charts(study.tables[0], results)}
    assert words in captions["t-accuracy-by-rate"]


@pytest.mark.parametrize(("done_seeds", "words"), [
    ((5, 5), "95 % intervals of the mean over 5 seeds."),
    ((5, 3), "95 % intervals of the mean over 3 to 5 seeds."),
    ((5, 1), "Bands over 1 to 5 seeds: 95 % intervals of the mean; of fewer than 3 seeds from the"),
    ((2, 1), "from the least to the greatest over 1 to 2 seeds."),
    ((1, 1), "One seed."),
])  # fmt: skip
def test_a_caption_says_what_the_bands_of_an_unfinished_study_are(tmp_path, done_seeds, words):
    rows = {"ravan": {"method": "ravan"}, "fedit": {"method": "fedit"}}
    tables = [{"title": "T", "rows": rows}]
    study, results = study_of(tmp_path, seeds=[0, 1, 2, 3, 4], tables=tables), Results(tmp_path)
    for run in table_runs(study, results):
        settings = dict(run.settings)
        if int(settings["seed"]) < done_seeds[settings["method"] == "fedit"]:
            results.add(run, result(0.5 + int(settings["seed"]) / 100))
    assert all(words in chart.about for chart in charts(study.tables[0], results))


def test_the_overview_names_means_of_the_last_evaluations(tmp_path):
    tables: list[dict[str, Any]] = [{"title": x, "rows": {"ravan": {}}} for x in ("A", "B")]
    for last, words in ((None, "last round, by"), (2, "last round, or its mean over the last ev")):
        study = study_of(tmp_path, tables=[tables[0], tables[1] | {"mean-of-last": last}])
        results = Results(tmp_path)
        fill(study, results, lambda _: 0.5)
        (chart,) = draw_pictures(study, results)["overview"]
        assert words in chart.about


def test_a_band_is_the_interval_of_the_mean():
    values = np.random.default_rng(0).normal(0.5, 0.1, (5, 3))
    low, high = band_ends(values)
    theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    np.testing.assert_allclose(low, theirs.low)
    np.testing.assert_allclose(high, theirs.high)
    low, high = band_ends(values[:2])
    np.testing.assert_array_equal(high, values[:2].max(0))


def test_with_time_as_metric_a_row_with_a_run_short_of_its_target_is_named(tmp_path):
    """The task's metric is drawn by time, of the rows that have a time."""

    def times(run, number):
        misses = "local-steps=1" in str(run) and "seed=2" in str(run)
        one = result(0.5)
        final = one.final | ({} if misses else {"time": 5.0 if number < 3 else 5.0 + number})
        return {"final": final, "curve": one.curve | {"time": [2.0, 5.0]}}

    rows = {"ravan": {}, "slow": {"local-steps": 1}}
    table, results = done(tmp_path, times, rows, "time", devices="edge-gpus")
    (line,) = axes_of(table, results)["all-accuracy-by-time"].lines
    assert np.asarray(line.get_xdata()).tolist() == [2.0, 5.0]
    lines = table_lines(table, results)
    assert lines[0].startswith("|  | time, s | ")
    assert "5.000 ± 0.000" in lines[2]
    assert lines[-1].startswith("Without a time")
    assert lines[-1].endswith(": slow (1 of 3 runs).")
    assert not any("| slow |" in line for line in lines)
