"""The tuning of learning rates: grid, runs, and comparison."""

import numpy as np
import pytest
from scipy import stats

from ravan_flwr.lab.choosing import (
    RateChoice,
    Score,
    grid_around,
    ranked,
    rate_beyond,
    rates_as_good,
)
from ravan_flwr.lab.tuning import plan_tuning

GRIDS = {
    1e-3: [3e-4, 1e-3, 3e-3],
    3e-3: [1e-3, 3e-3, 1e-2],
    5e-5: [1.7e-5, 5e-5, 1.7e-4],
    10.0: [3.0, 10.0],  # the key accepts at most 10
}


def test_a_grid_spans_half_a_decade_on_each_side():
    assert {rate: grid_around(rate) for rate in GRIDS} == GRIDS


def test_the_grid_is_extended_in_its_own_steps():
    rates = grid_around(3e-3)
    for _ in range(4):
        wider = rate_beyond(rates[0], rates), *rates, rate_beyond(rates[-1], rates)
        rates = [rate for rate in wider if rate is not None]
    # 10 is the key's maximum; 30 would be above it.
    assert rates == [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3, 1.0]
    assert rate_beyond(3e-3, rates) is None
    assert rate_beyond(10.0, [3.0, 10.0]) is None


@pytest.mark.parametrize("rounds", [20, 1])
def test_each_rate_is_measured_with_three_seeds_on_validation_splits(rounds):
    tuning = plan_tuning({"num-rounds": rounds})
    runs = [dict(r.settings) for rate in tuning.grid.values for r in tuning.row.candidates(rate)]
    assert len(runs) == 9
    for settings in runs:
        assert (settings["evaluate-on"], settings["validation-share"]) == ("clients", 0.2)
        assert settings["eval-every"] == settings["num-rounds"] == rounds
    assert {settings["seed"] for settings in runs} == {100, 101, 102}


def test_given_settings_apply_to_every_run():
    tuning = plan_tuning({"seed": 7, "validation-share": 0.1, "heads": 2}, 5, [1e-3, 1e-2, 1e-3])
    assert tuning.grid.values == (1e-3, 1e-2)
    assert (tuning.grid.extensions, tuning.grid.seeds) == (0, (7, 8, 9))
    (first, *others) = tuning.row.candidates(1e-2)
    assert dict(first.settings) == {
        "preset": "digits-vit", "method": "ravan", "evaluate-on": "clients", "heads": 2,
        "validation-share": 0.1, "learning-rate": 1e-2, "eval-every": 20,
        "seed": 7,
    }  # fmt: skip
    assert first.num_clients == 5
    assert len(others) == 2
    assert "5 clients, on their validation splits of 10 %" in tuning.describe()


@pytest.mark.parametrize(
    ("settings", "rates", "message"),
    [
        ({"learning-rate": 1e-3}, [], "got learning-rate=0.001, .* --rates"),
        ({"output-dir": "/x"}, [], "got output-dir=/x, .*--output"),
        ({"evaluate-on": "server"}, [], "got evaluate-on=server"),
        ({"preset": "digit"}, [], "preset 'digit' is unknown"),
        ({"method": "ravn"}, [], "method 'ravn' is unknown"),
        ({"validation-share": 0.0}, [], "needs examples to evaluate on"),
        ({"seed": 2**31 - 1}, [], "seed = "),
        ({}, [1e-3], "expected at least two different"),
        ({}, [1e-3, -1.0], "learning-rate = -1.0"),
        ({}, [1e-3, float("nan")], "learning-rate = nan"),
    ],
)
def test_unsupported_settings_of_a_tuning_are_refused(settings, rates, message):
    with pytest.raises(ValueError, match=message):
        plan_tuning(settings, None, rates)


def measured(values, metric="accuracy"):
    return {rate: Score(metric, v, [1.0] * len(v)) for rate, v in values.items()}


def test_rates_within_noise_follow_a_paired_t_test():
    # Equal differences of 0.02: no noise. Differences 0.03, -0.01, 0.04: scipy's t-test below.
    found = measured({1e-3: [0.90, 0.80, 0.85], 1e-2: [0.88, 0.78, 0.83], 3e-3: [0.87, 0.81, 0.81]})
    assert ranked(found)[0] == 1e-3
    assert rates_as_good(found) == [1e-3, 3e-3]
    random = np.random.default_rng(0)
    for _ in range(50):
        best, other = random.normal(0.02, 0.01, 3), random.normal(0.0, 0.01, 3)
        low, _ = stats.ttest_rel(best, other).confidence_interval(0.95)
        scores = [Score("accuracy", list(values), []) for values in (best, other)]
        assert scores[0].beats(scores[1]) == (low > 0)


def test_ties_are_broken_by_the_loss_and_then_by_the_smaller_rate():
    found = measured({1e-2: [0.9], 1e-3: [0.9], 3e-3: [0.9]})
    assert ranked(found)[0] == 1e-3
    found[3e-3].losses[0] = 0.5
    assert ranked(found)[0] == 3e-3
    assert rates_as_good(found) == [3e-3]


@pytest.mark.parametrize("metric", ["loss", "perplexity"])
def test_a_smaller_loss_is_better(metric):
    found = measured({1e-3: [2.0, 2.1], 1e-2: [1.0, 1.1]}, metric)
    assert ranked(found) == [1e-2, 1e-3]
    assert rates_as_good(found) == [1e-2]
    choice = RateChoice(plan_tuning({}).grid, [1e-3, 1e-2], found, False)
    assert choice.rate == 1e-2
    assert choice.at_the_edge
