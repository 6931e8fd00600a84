"""Robust sums against slow loops, and what they are for: some false replies do not matter."""

import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.server.aggregation import Aggregate, median_or_trimmed_mean
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import build, some_state, train_client

NUMBERS = st.one_of(st.none(), st.integers(-50, 50))
HOW = KEYS["weighting"].choices[2:]
ABLE = [name for name, listed in METHODS.items() if listed.averages]


def slow(values, old, how):
    """Of one coordinate; None is a client that did not train it."""
    there = sorted(value for value in values if value is not None)
    if len(there) < 3:
        return old
    if how == "median":
        return statistics.median(there)
    cut = max(1, int(0.2 * len(there)))
    return statistics.mean(there[cut : len(there) - cut])


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=12))
def test_the_middle_is_that_of_a_slow_loop(rows):
    replies = [torch.tensor([float("nan") if v is None else float(v) for v in r]) for r in rows]
    old = torch.tensor([7.0, 8.0, 9.0])
    for how in HOW:
        expected = [slow([row[i] for row in rows], float(old[i]), how) for i in range(3)]
        torch.testing.assert_close(
            median_or_trimmed_mean(old, replies, how), torch.tensor(expected, dtype=torch.float32)
        )


def fold(method, state, uploads, robust):
    pot = Aggregate(method, state, UpdateNormCheck(1e9), robust=robust)
    for upload, fraction in uploads:
        pot.offer(upload, fraction)
    return pot.close()


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ABLE)
def test_a_false_reply_of_five_does_not_matter(name, how):
    method, adapters = build(name)
    state = some_state(method, adapters)
    state[CLASSIFIER] = torch.zeros(4)
    honest = train_client(method, adapters, state, 1.0, 5) | {CLASSIFIER: torch.ones(4)}
    false = {
        key: value if value.dtype == torch.uint8 else torch.full_like(value, 1e6)
        for key, value in honest.items()
    }
    plain, robust = (
        fold(method, state, [(honest, 1.0)] * 4 + [(false, 1.0)], kind) for kind in ("none", how)
    )
    alone = fold(method, state, [(honest, 1.0)], "none")
    averaged = [key for key in plain if key not in method.frozen_tensors]
    assert all((plain[key] - alone[key]).abs().max() > 1e4 for key in averaged)
    for key, tensor in alone.items():
        torch.testing.assert_close(robust[key], tensor)


@pytest.mark.parametrize("how", HOW)
@pytest.mark.parametrize("name", ABLE)
def test_identical_replies_and_their_order_change_nothing(name, how):
    method, adapters = build(name)
    state = some_state(method, adapters)
    uploads = [(train_client(method, adapters, state, 1.0, seed), 1.0) for seed in range(5)]
    forth, back = (fold(method, state, order, how) for order in (uploads, uploads[::-1]))
    assert all(torch.equal(forth[key], back[key]) for key in forth)
    same = fold(method, state, uploads[:1] * 4, how)
    alone = fold(method, state, uploads[:1], "none")
    for key, tensor in alone.items():
        torch.testing.assert_close(same[key], tensor)


@pytest.mark.parametrize("how", HOW)
def test_a_head_counts_over_those_that_trained_it(how):
    method, adapters = build("ravan")
    state = some_state(method, adapters)
    uploads = [(train_client(method, adapters, state, 1 / 3, seed), 1 / 3) for seed in range(6)]
    got = fold(method, state, uploads, how)["H"].flatten(0, 1)
    old = state["H"].flatten(0, 1)
    trained: dict[int, list[torch.Tensor]] = {}
    for upload, _ in uploads:
        heads = [3 * i + h for i, row in enumerate(method.heads_in(upload)) for h in row]
        for place, head in enumerate(heads):
            trained.setdefault(head, []).append(upload["H"][place])
    assert 0 < len(trained) <= len(old)
    for head in range(len(old)):
        values = [tensor.flatten().tolist() for tensor in trained.get(head, [])]
        for i, number in enumerate(got[head].flatten().tolist()):
            expected = slow([row[i] for row in values], float(old[head].flatten()[i]), how)
            assert number == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("name", sorted(set(METHODS) - set(ABLE)))
def test_methods_that_are_no_mean_are_refused(name):
    told = f"weighting = 'median': got method '{name}', which does not compute its next state"
    with pytest.raises(ValueError, match=told):
        read_config({"method": name, "weighting": "median"})


def test_heads_that_others_left_are_refused():
    with pytest.raises(ValueError, match="weighting = 'median': got head-mean = 'all', expected"):
        read_config({"weighting": "median", "head-mean": "all"})
    read_config({"weighting": "median", "head-mean": "all", "method": "fedit"})  # has no heads


def test_of_two_replies_none_decides():
    """A node that claims more heads than the others is alone, or nearly, on some of them."""
    method, adapters = build("ravan")
    state = some_state(method, adapters)
    small = [(train_client(method, adapters, state, 1 / 3, seed), 1 / 3) for seed in range(3)]
    lies = []
    for seed in (7, 8):
        upload = train_client(method, adapters, state, 1.0, seed)
        lies.append(({"H": upload["H"] + 1e4, "heads": upload["heads"]}, 1.0))
    count = torch.zeros(2, 3)
    for upload, _ in small + lies[:1]:
        for row, heads in zip(count, method.heads_in(upload), strict=True):
            row[heads] += 1
    assert (count < 3).any()
    for how in HOW:
        got = fold(method, state, small + lies[:1], how)["H"]
        assert torch.equal(got[count < 3], state["H"][count < 3])
        assert (got - state["H"]).abs().max() < 100
        assert not torch.equal(got, state["H"]) or not (count >= 3).any()
        alone = fold(method, state, lies, how)["H"]
        assert torch.equal(alone, state["H"])


def test_robust_wants_three_clients_a_round():
    with pytest.raises(
        ValueError, match="weighting = 'median': got clients-per-round = 2, expected"
    ):
        read_config({"weighting": "median", "clients-per-round": 2})
