"""A round's sums: a broadcast is made once for all clients with the same budget fraction."""

import pytest

from ravan_flwr.server.aggregation import KEPT_BROADCASTS, Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import build, train_client


@pytest.fixture
def counting_method(monkeypatch):
    """Return a method that counts broadcasts, its adapters, and the requested budget fractions."""
    method, adapters = build("hetlora")
    requested, broadcast = [], method.broadcast

    def counting(state, fraction):
        requested.append(fraction)
        return broadcast(state, fraction)

    monkeypatch.setattr(method, "broadcast", counting)
    return method, adapters, requested


def test_a_broadcast_is_made_once_a_budget_fraction(counting_method):
    method, adapters, requested = counting_method
    state = method.initial_state(adapters)
    fractions = [1.0, 0.5, 1.0, 0.5, 1.0]
    uploads = [train_client(method, adapters, state, s, seed) for seed, s in enumerate(fractions)]
    requested.clear()
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    for upload, fraction in zip(uploads, fractions, strict=True):
        sums.check_and_add(upload, fraction)
    assert sums.count == len(fractions)
    assert sorted(requested) == [0.5, 1.0]


def test_few_broadcasts_are_cached_for_any_number_of_budget_fractions(counting_method):
    method, adapters, _ = counting_method
    state = method.initial_state(adapters)
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    for number in range(1, 4 * KEPT_BROADCASTS):
        fraction = number / (4 * KEPT_BROADCASTS)
        sums.check_and_add(train_client(method, adapters, state, fraction, number), fraction)
    assert sums._sent.cache_info().currsize == KEPT_BROADCASTS
