"""Intervals of means and of paired differences are those of scipy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from ravan_flwr.studies.intervals import Interval, difference, interval, students_t


@pytest.mark.parametrize("freedom", [*range(1, 41), 99, 1000])
@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.99])
def test_students_t_is_scipys(freedom, confidence):
    expected = stats.t.ppf((1 + confidence) / 2, freedom)
    assert students_t(freedom, confidence) == pytest.approx(expected, rel=1e-9)


@given(st.lists(st.floats(-10, 10), min_size=3, max_size=12))
def test_an_interval_is_that_of_a_t_test(values):
    found = interval(values)
    assert found.half is not None
    assert found.mean == pytest.approx(np.mean(values), abs=1e-12)
    if np.ptp(values) > 1e-3:  # scipy warns where the values are all but the same
        theirs = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
        assert (found.mean - found.half, found.mean + found.half) == pytest.approx(
            (theirs.low, theirs.high), rel=1e-6, abs=1e-9
        )
    else:
        assert found.half == pytest.approx(0, abs=0.01)


def test_one_value_or_two_have_no_interval():
    assert interval([3.0]) == Interval(3.0, None)
    assert interval([1.0, 2.0]) == Interval(1.5, None)
    assert interval([1.0, 2.0]).holds_zero is None
    assert interval([1.0, 2.0, 3.0]).holds_zero is not None


def test_differences_are_paired_by_the_seeds_that_both_have():
    random = np.random.default_rng(0)
    luck = random.normal(0, 5, 6)  # of a seed, the same for both
    mine = dict(enumerate(luck + random.normal(1.0, 0.1, 6)))
    others = dict(enumerate(luck + random.normal(0.0, 0.1, 6)))
    found = difference(mine, others)
    assert found is not None
    assert found.half is not None
    theirs = stats.ttest_rel([*mine.values()], [*others.values()]).confidence_interval(0.95)
    assert found.mean - found.half == pytest.approx(theirs.low)
    assert not found.holds_zero  # though the two overlap by far
    assert difference(mine, {0: others[0], 9: 1.0}) == Interval(mine[0] - others[0], None)
    assert difference(mine, {9: 1.0}) is None
