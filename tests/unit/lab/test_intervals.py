"""Intervals of means and of paired differences equal scipy's."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ravan_flwr.lab.results import Interval, difference, holm, interval
from tests.studies import ends

# Student's t, two-sided 95 %, by degrees of freedom: the table of NIST's handbook, 1.3.6.7.2.
PRINTED = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 9: 2.262, 30: 2.042}


@pytest.mark.parametrize("freedom", PRINTED)
def test_interval_widths_equal_a_printed_table(freedom):
    values = [float(number) for number in range(freedom + 1)]
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / freedom
    low, high = ends(interval(values))
    width = (high - low) / 2 / (variance / len(values)) ** 0.5
    assert width == pytest.approx(PRINTED[freedom], abs=6e-4)


def test_holms_correction_equals_a_worked_example():
    """Of 0.01, 0.04, 0.03, 0.005 (Wikipedia, Holm-Bonferroni method): 0.005 and 0.01 are rejected.

    By hand: 4 * 0.005, 3 * 0.01, 2 * 0.03, and 0.04, which is no less than the one before.
    """
    found = holm({"H1": 0.01, "H2": 0.04, "H3": 0.03, "H4": 0.005})
    assert found == pytest.approx({"H4": 0.02, "H1": 0.03, "H3": 0.06, "H2": 0.06})
    assert {name for name, p in found.items() if p < 0.05} == {"H1", "H4"}
    assert holm({"a": 0.6, "b": 0.9}) == {"a": 1.0, "b": 1.0}
    assert holm({}) == {}


@given(st.lists(st.floats(0, 1), max_size=8))
def test_holms_p_values_agree_with_the_step_down_procedure(p_values):
    """Holm's step-down procedure rejects from the smallest p-value on, until one is too large."""
    by_name = {str(number): p for number, p in enumerate(p_values)}
    for level in (0.01, 0.05, 0.3):
        rejected, left = set(), sorted(by_name, key=lambda name: by_name[name])
        while left and by_name[left[0]] * len(left) <= level:
            rejected.add(left.pop(0))
        found = {name for name, p in holm(by_name).items() if p <= level}
        assert found == rejected


@given(st.lists(st.floats(-1, 1).map(lambda x: round(x, 3)), min_size=3, max_size=12, unique=True))
def test_a_p_value_equals_that_of_a_t_test(values):
    assert interval(values).p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue, rel=1e-9)


def test_equal_differences_have_a_p_value():
    assert interval([0.0, 0.0, 0.0]).p == 1
    assert interval([0.5, 0.5, 0.5]).p == 0
    assert interval([0.5, 0.5]).p is None


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12))
def test_an_interval_equals_that_of_a_t_test(values):
    found = interval(values)
    low, high = ends(found)
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    if np.ptp(values) > 1e-3:  # scipy warns where the values are almost equal
        theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert (low, high) == pytest.approx((theirs.low, theirs.high), rel=1e-6, abs=1e-9)
    else:
        assert 0 <= (high - low) / 2 <= 10 * np.ptp(values) + 1e-9


def test_one_value_or_two_have_no_interval():
    assert interval([3.0]) == Interval(3.0, None)
    assert interval([1.0, 2.0]) == Interval(1.5, None)
    assert interval([1.0, 2.0]).contains_zero is None
    assert interval([1.0, 2.0, 3.0]).contains_zero is not None


def test_differences_are_paired_by_common_seeds():
    random = np.random.default_rng(0)
    seed_effect = random.normal(0, 5, 6)  # of a seed, the same for both
    values = dict(enumerate(seed_effect + random.normal(1.0, 0.1, 6)))
    others = dict(enumerate(seed_effect + random.normal(0.0, 0.1, 6)))
    found = difference(values, others)
    assert found is not None
    theirs = stats.ttest_rel([*values.values()], [*others.values()]).confidence_interval(0.95)
    assert ends(found) == pytest.approx((theirs.low, theirs.high))
    assert not found.contains_zero  # although the two separate intervals overlap
    assert difference(values, {0: others[0], 9: 1.0}) == Interval(values[0] - others[0], None)
    assert difference(values, {9: 1.0}) is None
