"""Robust sums equal plain loops, and some false replies have little effect."""

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


def robust_by_loop(values, old, how):
    """Aggregate one coordinate; None is a client that did not train it."""
    present = sorted(value for value in values if value is not None)
    if len(present) < 3:
        return old
    if how == "median":
        return statistics.median(present)
    cut = max(1, int(0.2 * len(present)))
    return statistics.mean(present[cut : len(present) - cut])


@given(st.lists(st.lists(NUMBERS, min_size=3, max_size=3), min_size=1, max_size=12))
def test_robust_sums_equal_a_plain_loop(rows):
    replies = [torch.tensor([float("nan") if v is None else float(v) for v in r]) for r in rows]
    old = torch.tensor([7.0, 8.0, 9.0])
    for how in HOW:
        expected = [robust_by_loop([row[i] for row in rows], float(old[i]), how) for i in range(3)]
        torch.testing.assert_close(
            median_or_trimmed_mean(old, replies, how), torch.tensor(expected, dtype=torch.float32)
        )


def accumulate(method, state, uploads, robust):
    sums = Aggregate(method, state, UpdateNormCheck(1e9), robust=robust)
    for upload, fraction in uploads:
        sums.check_and_add(upload, fraction)
    return sums.close()


@pytest.mark.parametrize("weighting", HOW)
@pytest.mark.parametrize("name", ABLE)
def test_one_false_reply_of_five_has_little_effect(name, weighting):
    method, adapters = build(name)
    state = some_state(method, adapters)
    state[CLASSIFIER] = torch.zeros(4)
    honest = train_client(method, adapters, state, 1.0, 5) | {CLASSIFIER: torch.ones(4)}
    false = {
        key: value if value.dtype == torch.uint8 else torch.full_like(value, 1e6)
        for key, value in honest.items()
    }
    plain, robust = (
        accumulate(method, state, [(honest, 1.0)] * 4 + [(false, 1.0)], kind)
        for kind in ("none", weighting)
    )
    alone = accumulate(method, state, [(honest, 1.0)], "none")
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
    forth, back = (accumulate(method, state, order, how) for order in (uploads, uploads[::-1]))
    assert all(torch.equal(forth[key], back[key]) for key in forth)
    same = accumulate(method, state, uploads[:1] * 4, how)
    alone = accumulate(method, state, uploads[:1], "none")
    for key, tensor in alone.items():
        torch.testing.assert_close(same[key], tensor)


@pytest.mark.parametrize("how", HOW)
def test_a_head_is_aggregated_over_the_clients_that_trained_it(how):
    method, adapters = build("ravan")
    state = some_state(method, adapters)
    uploads = [(train_client(method, adapters, state, 1 / 3, seed), 1 / 3) for seed in range(6)]
    got = accumulate(method, state, uploads, how)["H"].flatten(0, 1)
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
            expected = robust_by_loop(
                [row[i] for row in values], float(old[head].flatten()[i]), how
            )
            assert number == pytest.approx(expected, rel=1e-5, abs=1e-6)


def test_the_mean_over_all_clients_is_refused():
    with pytest.raises(ValueError, match="weighting = 'median': got head-mean = 'all', expected"):
        read_config({"weighting": "median", "head-mean": "all"})
    # Fedit has no heads.
    read_config({"weighting": "median", "head-mean": "all", "method": "fedit"})


def test_two_replies_do_not_change_the_state():
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
        got = accumulate(method, state, small + lies[:1], how)["H"]
        assert torch.equal(got[count < 3], state["H"][count < 3])
        assert (got - state["H"]).abs().max() < 100
        assert not torch.equal(got, state["H"]) or not (count >= 3).any()
        alone = accumulate(method, state, lies, how)["H"]
        assert torch.equal(alone, state["H"])


def test_robust_weighting_needs_three_clients_a_round():
    with pytest.raises(
        ValueError, match="weighting = 'median': got clients-per-round = 2, expected"
    ):
        read_config({"weighting": "median", "clients-per-round": 2})
