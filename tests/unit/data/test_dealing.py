"""Equal shares whose class proportions are drawn for each client: the paper's non-IID clients."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.data.dealing import counts_by_client, deal_by_client, equal_shares

CLASSES = 10


def labels_of(number, seed=0):
    return np.random.default_rng(seed).integers(0, CLASSES, number)


def shares_of(labels, dealt):
    return np.array([np.bincount(labels[rows], minlength=CLASSES) / len(rows) for rows in dealt])


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.floats(1e-3, 1e3),
    st.integers(0, 2**31),
    st.integers(0, 300),
)
def test_everything_is_dealt_out_once_in_equal_shares(clients, classes, alpha, seed, more):
    labels = np.random.default_rng(seed).integers(0, classes, clients + more)
    dealt = deal_by_client(labels, clients, alpha, np.random.default_rng(seed))
    assert sorted(np.concatenate(dealt)) == list(range(len(labels)))
    sizes = [len(rows) for rows in dealt]
    assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize("alpha", [1e-300, 1e-12, 1e6])
def test_the_ends_of_alpha_are_no_end(alpha):
    labels = labels_of(600)
    dealt = deal_by_client(labels, 6, alpha, np.random.default_rng(0))
    assert [len(rows) for rows in dealt] == [100] * 6


@pytest.mark.parametrize("alpha", [0.1, 0.3, 1.0])
def test_clients_are_as_uneven_as_numpys_own_draws(alpha):
    labels = labels_of(40_000)
    dealt = deal_by_client(labels, 200, alpha, np.random.default_rng(0))
    drawn = np.random.default_rng(12345).dirichlet([alpha] * CLASSES, size=20_000)
    got = shares_of(labels, dealt)
    for order in (1, 2, 3):  # the largest share of a client, the second, the third
        mean = np.sort(got, 1)[:, -order].mean()
        assert mean == pytest.approx(np.sort(drawn, 1)[:, -order].mean(), abs=0.03)


def test_a_share_follows_the_clients_own_draw():
    labels = labels_of(40_000)
    dealt = deal_by_client(labels, 200, 0.3, np.random.default_rng(7))
    drawn = np.random.default_rng(7).dirichlet([0.3] * CLASSES, size=200)  # the first it draws
    assert np.abs(shares_of(labels, dealt) - drawn).sum(1).mean() < 0.2


def test_counts_are_the_drawn_ones_where_those_add_up():
    drawn = np.array([[0.5, 0.5], [0.25, 0.75]])
    counts = counts_by_client(drawn, np.array([8, 8]), np.array([6, 10]))
    assert counts.tolist() == [[4, 4], [2, 6]]


def test_a_class_that_nobody_drew_is_dealt_out_all_the_same():
    drawn = np.array([[1.0, 0.0], [1.0, 0.0]])
    counts = counts_by_client(drawn, np.array([5, 5]), np.array([4, 6]))
    assert counts.sum(0).tolist() == [4, 6]
    assert counts.sum(1).tolist() == [5, 5]


def test_shares_differ_by_one_at_most():
    assert equal_shares(11, 4).tolist() == [3, 3, 3, 2]
