"""The lines of a table: intervals, paired differences, significance, and bold type."""

import csv
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ravan_flwr.lab.choosing import table_runs
from ravan_flwr.lab.lines import compare_rows, sentence
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.tables import _legend, markdown, rows_as_csv
from tests.studies import ends, fill, found
from tests.unit.lab import written

METHODS = ("ravan", "fedit", "ffa-lora", "hetlora", "flexlora")


def study_of(tmp_path, seeds=5, rows=METHODS, **table):
    table = {"title": "T", "rows": {name: {"method": name} for name in rows}} | table
    return written.study_of(tmp_path, seeds=list(range(seeds)), tables=[table])


def filled(tmp_path, values, metric="accuracy", **table):
    """Return a study with these values of each method, by seed; None is a failure."""
    study = study_of(tmp_path, len(next(iter(values.values()))), tuple(values), **table)
    results = Results(tmp_path)
    fill(study, results, lambda s: values[s["method"]][s["seed"]], metric)
    return study, results


def by_row(study, results):
    return {line.row: line for line in compare_rows(study.tables[0], results)}


def sentence_of(study, results):
    return sentence(study.tables[0], compare_rows(study.tables[0], results))


def csv_of(study, results):
    lines = rows_as_csv(study, results).splitlines()
    return {row["row"]: row for row in csv.DictReader(lines)}


@pytest.fixture
def random_values():
    """The effect of the seed is much larger than the differences between methods."""
    random = np.random.default_rng(3)
    seed_effect = random.normal(0.7, 0.05, 5)
    means = dict(zip(METHODS, (0.0, 0.02, -0.02, 0.001, 0.03), strict=True))
    return {
        name: list(map(float, seed_effect + mean + random.normal(0, 0.004, 5)))
        for name, mean in means.items()
    }


def test_intervals_and_differences_equal_scipys(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    table = study.tables[0]
    best = max(random_values, key=lambda name: np.mean(random_values[name]))
    for line in compare_rows(table, results):
        mine = random_values[line.row]
        theirs = stats.ttest_1samp(mine, 0.0).confidence_interval(0.95)
        assert ends(line.interval) == pytest.approx((theirs.low, theirs.high))
        to_best = stats.ttest_rel(mine, random_values[best])
        assert line.best == (line.row == best or to_best.pvalue > 0.05)
        if line.row == "ravan":
            assert line.difference is None
            continue
        to_ravan = stats.ttest_rel(mine, random_values["ravan"])
        low, high = to_ravan.confidence_interval(0.95)
        assert ends(line.difference) == pytest.approx((low, high))
        assert line.standing == ("better" if low > 0 else "worse" if high < 0 else "alike")
    assert sentence_of(study, results) == (
        "Significantly better than ravan: fedit, flexlora. "
        "Significantly worse than ravan: ffa-lora. "
        "Not significantly different from ravan: hetlora."
    )
    text = markdown(study, results)
    assert "|  | accuracy, % | to ravan | learning rate |" in text
    (row,) = [row for row in text.splitlines() if row.startswith("| flexlora |")]
    mean, difference = row.split("|")[2:4]
    assert mean.strip().startswith("**")
    assert difference.strip().startswith("+")


@pytest.mark.parametrize("metric", ["accuracy", "perplexity"])
def test_results_that_hold_for_all_rates_within_noise_are_listed(tmp_path, metric):
    """Of the rates within noise, fedit is better with each, ffa-lora with its best alone."""
    random = np.random.default_rng(5)
    seed_effect = random.normal(0.5, 0.05, 5)
    means = {
        "ravan": {1e-3: 0.20, 1e-2: 0.22}, "fedit": {1e-3: 0.30, 1e-2: 0.26},
        "ffa-lora": {1e-3: 0.25, 1e-2: 0.21}, "full": {1e-3: 0.1},
    }  # fmt: skip
    sign = -1 if metric == "perplexity" else 1
    ended = {
        (method, rate): sign * (seed_effect + mean + random.normal(0, 0.002, 5))
        for method, of_rates in means.items()
        for rate, mean in of_rates.items()
    }

    def value_of(settings):
        method, rate, seed = (settings[key] for key in ("method", "learning-rate", "seed"))
        if seed < 100:
            return float(ended[method, rate][seed])
        if rate == 1e-3:
            return sign * 0.8
        # 0.01 is within noise by validation, except for full.
        noise = {100: 0.02, 101: -0.03, 102: 0.0}[seed]
        return sign * (0.3 if method == "full" else 0.8 + noise)

    choose = {"learning-rate": [1e-3, 1e-2], "seeds": [100, 101, 102], "extensions": 0}
    rows = {name: {"method": name} for name in means}
    table = {"title": "T", "rows": rows, "run-as-good": True}
    study = written.study_of(tmp_path, seeds=list(range(5)), choose=choose, tables=[table])
    results = Results(tmp_path)
    fill(study, results, value_of, metric)
    lines = compare_rows(study.tables[0], results)
    assert sentence(study.tables[0], lines) == (
        "Significantly better than ravan: fedit, ffa-lora. Significantly worse than ravan: full. "
        "With any of the rates that are as good, of both rows, this holds for: fedit, full."
    )
    line = lines[1]
    theirs = stats.ttest_rel(ended["fedit", 1e-2], ended["fedit", 1e-3])
    low, high = theirs.confidence_interval(0.95)
    assert ends(line.shift(1e-2)) == pytest.approx((low, high))
    if metric == "accuracy":
        cell = f"| 0.01: {50 * (low + high):.1f} ± {50 * (high - low):.1f} | 6 |"
        assert cell in markdown(study, results)
    not_all_run = [replace(lines[0], as_good={1e-2: {0: 0.5}}), *lines[1:]]
    assert "With any of" not in sentence(study.tables[0], not_all_run)
    rate, _, finals = csv_of(study, results)["fedit"]["as-good-finals"].partition(": ")
    assert float(rate) == 1e-2
    assert list(map(float, finals.split())) == pytest.approx(list(ended["fedit", 1e-2]))


def test_means_of_the_last_evaluations_are_compared(tmp_path, random_values):
    """The curve of `fill` has half of the final value in round 1 of 2."""
    study, results = filled(tmp_path, random_values, **{"compare-last": 2})
    text, rows = markdown(study, results), csv_of(study, results)
    for line in compare_rows(study.tables[0], results)[1:]:
        theirs = stats.ttest_rel(random_values[line.row], random_values["ravan"])
        low, high = theirs.confidence_interval(0.95)
        assert ends(line.late) == pytest.approx((0.75 * low, 0.75 * high))
        assert f"{75 * (low + high) / 2:.1f} ± {75 * (high - low) / 2:.1f}" in text
        assert float(rows[line.row]["late-difference"]) == pytest.approx(0.75 * (low + high) / 2)
    assert "| the same, last 2 |" in text
    (run, *_) = study.tables[0].rows["fedit"].runs()
    shorter = {"curve": {"round": [2], "accuracy": [0.5]}}
    results.add(run, found(results, run).model_copy(update=shorter))
    without = [random_values[name][1:] for name in ("fedit", "ravan")]
    high = stats.ttest_rel(*without).confidence_interval(0.95).high
    assert ends(by_row(study, results)["fedit"].late)[1] == pytest.approx(0.75 * high)


def test_a_table_may_show_means_of_the_last_evaluations(tmp_path, random_values):
    study, results = filled(tmp_path, random_values, **{"mean-of-last": 2})
    for line in compare_rows(study.tables[0], results):
        expected = [0.75 * value for value in random_values[line.row]]
        assert list(line.values.values()) == pytest.approx(expected)
    assert "| accuracy, %, mean of the last 2 |" in markdown(study, results)


def test_a_row_whose_runs_ended_early_has_no_mean_of_the_last_evaluations(tmp_path, random_values):
    """Runs with `max-bytes` may end after one evaluation; the other rows have their values."""
    study, results = filled(tmp_path, random_values, **{"mean-of-last": 2})
    run = next(x for x in table_runs(study, results) if dict(x.settings)["method"] == "fedit")
    shorter = {"curve": {"round": [1], "accuracy": [0.5]}}
    results.add(run, found(results, run).model_copy(update=shorter))
    assert by_row(study, results).keys() == {*random_values} - {"fedit"}
    text = markdown(study, results)
    assert "mean of the last 2 evaluations, since runs ended early: fedit (1 of 5 runs)." in text
    assert "| fedit |" not in text


def test_a_classification_has_a_column_of_macro_f1(tmp_path, random_values):
    study, results = filled(tmp_path, random_values, **{"mean-of-last": 2})
    assert "macro-F1" not in markdown(study, results)  # of older runs, which have not recorded it
    for run in (run for row in study.tables[0].rows.values() for run in row.runs()):
        old = found(results, run)
        settings = dict(run.settings)
        macro_f1 = {"macro-f1": [random_values[settings["method"]][settings["seed"]]] * 2}
        curve = {name: values[-2:] for name, values in old.curve.items()} | macro_f1
        final = old.final | {"macro-f1": 0.0}  # the table has the means of the curve
        results.add(run, old.model_copy(update={"curve": curve, "final": final}))
    text = markdown(study, results)
    assert "| macro-F1, % |" in text
    for values in random_values.values():
        low, high = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert f"| {100 * np.mean(values):.1f} ± {50 * (high - low):.1f} |" in text


def test_a_table_may_be_of_macro_f1(tmp_path):
    """The server measures it for every classification; clients that evaluate do not."""
    study = study_of(tmp_path, rows=["ravan"], metric="macro-f1")
    assert study.tables[0].metric == "macro-f1"
    for settings in ({"evaluate-on": "clients"}, {"preset": "general-nlp"}):
        with pytest.raises(ValueError, match="metric = 'macro-f1': row 'ravan' measures loss"):
            study_of(tmp_path, rows=["ravan"], metric="macro-f1", settings=settings)


def test_a_missing_reference_row_and_missing_seeds_are_reported(tmp_path, random_values):
    """Differences are of the seeds that both rows have."""
    fedit, ravan = (random_values[name] for name in ("fedit", "ravan"))
    four = filled(tmp_path, random_values | {"fedit": [*fedit[:4], None]})
    high = stats.ttest_rel(fedit[:4], ravan[:4]).confidence_interval(0.95).high
    assert ends(by_row(*four)["fedit"].difference)[1] == pytest.approx(high)
    assert " (4 of 5 seeds) |" in markdown(*four)
    without = filled(tmp_path / "other", random_values | {"ravan": [None] * 5})
    assert sentence_of(*without) == "Row ravan is not done, so that there are no differences."


def test_rejected_replies_are_told_below_the_table(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    lines = [
        replace(
            line,
            results={
                seed: result.model_copy(update={"rejected": seed if line.row == "fedit" else 0})
                for seed, result in line.results.items()
            },
        )
        for line in compare_rows(study.tables[0], results)
    ]
    assert sentence(study.tables[0], lines).endswith(" Rejected or missing replies: fedit 10.")


@pytest.mark.parametrize("metric", ["perplexity", "perplexity-code"])
def test_a_lower_loss_is_better(tmp_path, metric):
    """Also for one of several test sets."""
    values = {"ravan": [1.0, 1.1, 1.2], "fedit": [2.0, 2.1, 2.21], "full": [0.5, 0.6, 0.71]}
    study, results = filled(tmp_path, values, metric)
    assert sentence_of(study, results) == (
        "Significantly better than ravan: full. Significantly worse than ravan: fedit."
    )
    assert [row for row, line in by_row(study, results).items() if line.best] == ["full"]


@pytest.mark.parametrize(("seeds", "beginning"), [(1, "With one seed"), (2, "With 2 seeds")])
def test_with_one_or_two_seeds_no_row_is_called_better(tmp_path, seeds, beginning):
    study, results = filled(tmp_path, {"ravan": [0.9, 0.8][:seeds], "fedit": [0.5, 0.4][:seeds]})
    text = markdown(study, results).partition("How to read")[0]
    assert f"{beginning} there is no interval, so no row is called better than another." in text
    assert "±" not in text
    assert "Ahead" not in text
    assert "| by seed |" in text
    assert "with fewer than three seeds, the best mean alone" in text
    assert "95 %" not in text  # interval, of which there is none


def test_the_legend_explains_the_columns_that_the_tables_have(tmp_path, random_values):
    one_seed = markdown(*filled(tmp_path / "1", {"ravan": [0.9], "fedit": [0.5]}))
    assert "No learning rate was chosen by results" in one_seed
    planned = markdown(*filled(tmp_path / "2", random_values, contrasts=["fedit"]))
    for explained in ("Differences are paired by seed.", "*p, Holm*: of a paired t-test"):
        assert explained in planned
        assert explained not in one_seed
    assert "*As good*" not in planned  # no rate is chosen
    for text, paired in (("| from T |", True), ("| of T |", False)):
        assert ("Differences are paired by seed." in _legend(text)) == paired
    assert "*Up*, *down*, *client s*: all clients" in planned


def test_a_reference_is_compared_but_cannot_be_best(tmp_path, random_values):
    lines = by_row(*filled(tmp_path, random_values, references=["flexlora"]))
    assert not lines["flexlora"].best
    assert lines["flexlora"].standing == "better"
    assert lines["fedit"].best


def test_differences_are_relative_to_the_named_row(tmp_path, random_values):
    assert "| to fedit |" in markdown(*filled(tmp_path, random_values, against="fedit"))
    for references, against in (([], "fedit"), (["fedit"], "full")):
        study = study_of(tmp_path, rows=("fedit", "full"), references=references)
        assert study.tables[0].against == against


def test_every_accuracy_has_its_seconds_and_bytes(tmp_path, random_values):
    study, results = filled(tmp_path, random_values)
    for row in csv_of(study, results).values():
        assert (row["bytes-up"], row["bytes-down"]) == ("1000000", "2000000")
        assert row["client-seconds"] == "8.0"
        assert row["seeds"] == "0 1 2 3 4"
        finals = list(map(float, row["finals"].split()))
        assert finals == random_values[row["row"]]
        assert float(row["mean"]) == pytest.approx(np.mean(finals))
        assert float(row["spread"]) == pytest.approx(np.std(finals, ddof=1))
    assert markdown(study, results).count("| 1.00 MB | 2.00 MB | 8 |") == len(METHODS)


def test_planned_contrasts_are_corrected_by_holm(tmp_path, random_values):
    """The p-values are scipy's; of three contrasts the smallest counts three times."""
    names = ["fedit", "hetlora", "flexlora"]
    study, results = filled(tmp_path, random_values, contrasts=names)
    lines = by_row(study, results)
    raw = {x: stats.ttest_rel(random_values[x], random_values["ravan"]).pvalue for x in names}
    first, second, third = sorted(raw, key=lambda name: raw[name])
    assert lines[first].p_holm == pytest.approx(min(1, 3 * raw[first]))
    assert lines[second].p_holm == pytest.approx(max(3 * raw[first], 2 * raw[second]))
    assert lines[third].p_holm == pytest.approx(max(2 * raw[second], raw[third]))
    assert lines["ffa-lora"].p_holm is None
    found = [x for x in names if (lines[x].p_holm or 0) < 0.05]
    expected = "with Holm's correction over the 3 planned contrasts: " + ", ".join(found)
    assert f"Significantly different from ravan {expected}." in sentence_of(study, results)
    assert "| p, Holm |" in markdown(study, results)
    rows = csv_of(study, results)
    assert float(rows[third]["p-holm"]) == pytest.approx(lines[third].p_holm)
    assert rows["ffa-lora"]["p-holm"] == ""


def test_an_incomplete_contrast_counts_as_planned(tmp_path, random_values):
    values = random_values | {"hetlora": [None] * 5}
    study, results = filled(tmp_path, values, contrasts=["fedit", "hetlora"])
    raw = stats.ttest_rel(random_values["fedit"], random_values["ravan"]).pvalue
    assert by_row(study, results)["fedit"].p_holm == pytest.approx(2 * raw)
    assert "Planned contrasts without a result: hetlora." in markdown(study, results)
