"""A round's sums: what a client was sent is made once for all clients with that share."""

import pytest

from ravan_flwr.server.aggregation import KEPT_BROADCASTS, Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import build, train_client


@pytest.fixture
def counted(monkeypatch):
    """A method with a broadcast for each share, and the shares that it was asked for."""
    method, adapters = build("hetlora")
    asked, broadcast = [], method.broadcast

    def counting(state, fraction):
        asked.append(fraction)
        return broadcast(state, fraction)

    monkeypatch.setattr(method, "broadcast", counting)
    return method, adapters, asked


def test_a_broadcast_is_made_once_a_share(counted):
    method, adapters, asked = counted
    state = method.initial_state(adapters)
    fractions = [1.0, 0.5, 1.0, 0.5, 1.0]
    uploads = [train_client(method, adapters, state, s, seed) for seed, s in enumerate(fractions)]
    asked.clear()
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    for upload, fraction in zip(uploads, fractions, strict=True):
        sums.offer(upload, fraction)
    assert sums.count == len(fractions)
    assert sorted(asked) == [0.5, 1.0]


def test_few_broadcasts_are_kept_however_many_shares_there_are(counted):
    method, adapters, _ = counted
    state = method.initial_state(adapters)
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    for number in range(1, 4 * KEPT_BROADCASTS):
        fraction = number / (4 * KEPT_BROADCASTS)
        sums.offer(train_client(method, adapters, state, fraction, number), fraction)
    assert sums._sent.cache_info().currsize == KEPT_BROADCASTS
