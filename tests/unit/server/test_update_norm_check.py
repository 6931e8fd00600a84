"""How far one client may move what it was sent, against slow loops and against liars."""

import itertools
import math
import statistics

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.keys import KEYS
from ravan_flwr.messages.wire import decode, encode
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.methods.tensors import MeansBySize
from ravan_flwr.server.aggregation import Aggregate, open_calibration
from ravan_flwr.server.update_norm_check import (
    ENOUGH,
    FACTOR,
    FLOOR,
    REACH,
    Change,
    UpdateNormCheck,
    changes_of,
)
from tests.methods import build, some_state, train_client


def sizes(*values, name="H", numbers=100):
    """Changes with these root mean squares, of a tensor that was zero."""
    return [{name: Change(numbers * value**2, 0.0, numbers)} for value in values]


@pytest.mark.parametrize("name", METHODS)
@given(share=st.sampled_from([0.25, 0.5, 1.0]), seed=st.integers(0, 9))
def test_a_change_counts_from_what_the_client_was_sent(name, share, seed):
    method, adapters = build(name)
    share = share if method.can_train(share) else 1.0
    state = some_state(method, adapters) | {CLASSIFIER: torch.zeros(4)}
    own = {k: v for k, v in state.items() if k != CLASSIFIER}
    method.load(adapters, method.broadcast(own, share))
    random = torch.Generator().manual_seed(seed)
    method.choose(adapters, share, random, lambda: None)
    still = method.upload(adapters) | {CLASSIFIER: torch.zeros(4)}
    limit = UpdateNormCheck(1e-9)
    pot = Aggregate(method, state, limit)
    pot.offer(still, share)  # it changes nothing, however large the state is
    moved = {k: v + 0.5 if v.is_floating_point() else v for k, v in still.items()}
    numbers = sum(v.numel() for v in moved.values() if v.is_floating_point())
    told = f"change of norm {0.5 * math.sqrt(numbers):.4g}, expected at most 1e-09"
    with pytest.raises(ValueError, match=told):
        pot.offer(moved, share)
    assert pot.count == 1


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9))
def test_the_size_of_a_change_is_that_of_a_slow_loop(numbers):
    new, old = torch.tensor(numbers), torch.arange(float(len(numbers)))
    (change,) = changes_of({"x": new}, {"x": old}).values()
    squares = [(a - b) ** 2 for a, b in zip(new.tolist(), old.tolist(), strict=True)]
    assert change.size == pytest.approx(math.sqrt(statistics.mean(squares)), rel=1e-4, abs=1e-6)
    before = math.sqrt(statistics.mean(b * b for b in old.tolist()))
    assert change.before == pytest.approx(before)


@pytest.mark.parametrize("wire", KEYS["wire"].choices)
@given(st.integers(0, 99), st.floats(1e-3, 1e2), st.sampled_from([(3, 5, 7), (2500,), (1,)]))
def test_what_the_wire_rounds_is_within_the_limit_and_hardly_more_is(wire, seed, scale, shape):
    """A client that trains nothing, with tensors that have far larger numbers among others."""
    random = torch.Generator().manual_seed(seed)
    state = {"x": scale * torch.randn(shape, generator=random).pow(3)}
    back = state
    for _ in range(2):
        back = decode(encode(back, wire, random), wire)
    limit = UpdateNormCheck(None, 0.0, wire=wire)
    changes = changes_of(back, state, wire)
    limit.check(changes)
    most = limit._most("x", changes["x"])[0]
    assert most <= 0.1 * float(state["x"].abs().max()) + 1e-6  # 16 bits have a smallest number
    assert (most == 0) == (wire == "float32")


def test_before_there_is_a_history_the_optimiser_is_the_limit():
    limit = UpdateNormCheck(None, step=0.1)
    most = REACH * 0.1 * 1.1
    for one in sizes(0.0, 0.99 * most):
        limit.check(one)
    told = f"changes H by .*expected at most {most:.4g}, which is what 0.1 = learning-rate x local"
    with pytest.raises(ValueError, match=told):
        limit.check(*sizes(1.01 * most))
    limit.learn(sizes(*[0.001] * (ENOUGH - 1)))
    limit.check(*sizes(0.99 * most))  # too few yet
    limit.learn(sizes(0.001))
    with pytest.raises(ValueError, match=r"where 0.001 was usual in the last rounds; if honest"):
        limit.check(*sizes(0.99 * most))


def test_later_what_is_usual_is_the_limit_within_bounds():
    def most_after(usual):
        limit = UpdateNormCheck(None, step=1.0)
        limit.learn(sizes(*[usual] * ENOUGH))
        for most in (x / 1000 for x in range(4000)):
            try:
                limit.check(*sizes(most))
            except ValueError:
                return most
        return math.inf

    reach = REACH * 2.0
    assert most_after(0.3) == pytest.approx(FACTOR * 0.3, abs=2e-3)
    assert most_after(0.0) == pytest.approx(FLOOR * reach, abs=2e-3)
    assert most_after(2.9) == pytest.approx(reach, abs=2e-3)


def test_the_limit_does_not_depend_on_the_order_and_survives_in_its_memory():
    values = [0.1, 0.5, 0.2, 0.3, 0.4, 0.11, 0.12, 0.13]
    memories = []
    for order in (values, values[::-1], sorted(values)):
        limit = UpdateNormCheck(None, 1.0)
        limit.learn(sizes(*order))
        memories.append(limit.memory["H"])
    assert all(torch.equal(memory, memories[0]) for memory in memories)
    again = UpdateNormCheck(None, 1.0, {"H": memories[0]})
    for one, two in itertools.pairwise((limit, again)):
        with pytest.raises(ValueError, match="expected") as first:
            one.check(*sizes(2.0))
        with pytest.raises(ValueError, match="expected") as second:
            two.check(*sizes(2.0))
        assert str(first.value) == str(second.value)


def test_a_client_of_more_steps_may_move_further_and_one_of_fewer_as_far():
    limit = UpdateNormCheck(None)
    steps = [0.1, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.4]
    limit.learn(sizes(*[0.05] * ENOUGH), steps)
    for step, most in ((0.2, FACTOR * 0.05), (0.4, FACTOR * 0.1), (0.1, FACTOR * 0.05)):
        limit.check(sizes(0.99 * most)[0], step)
        with pytest.raises(ValueError, match="was usual in the last rounds"):
            limit.check(sizes(1.01 * most)[0], step)
    reach = REACH * 0.01 * 1.01  # of one that hardly takes a step, however far others go
    limit.check(sizes(0.99 * reach)[0], 0.01)
    with pytest.raises(ValueError, match="changes H by"):
        limit.check(sizes(1.01 * reach)[0], 0.01)
    again = UpdateNormCheck(None, memory=limit.memory)
    with pytest.raises(ValueError, match="where 0.1 was usual"):
        again.check(sizes(1.01 * FACTOR * 0.1)[0], 0.4)


def test_before_there_is_a_history_each_client_has_its_own_limit():
    limit = UpdateNormCheck(None)
    limit.check(sizes(0.9 * REACH * 0.3 * 1.3)[0], 0.3)
    with pytest.raises(ValueError, match="0.1 = learning-rate x local-steps of its examples allow"):
        limit.check(sizes(0.9 * REACH * 0.3 * 1.3)[0], 0.1)
    old = {"B": torch.ones(100)}
    limit.check_state(old, {"B": torch.full((100,), 5.0)}, step=1.0)
    with pytest.raises(ValueError, match="the norm of B would grow by 40"):
        limit.check_state(old, {"B": torch.full((100,), 5.0)}, step=0.1)


@pytest.mark.parametrize("lies", [[0.0] * 3, [2.9] * 3])
def test_a_minority_does_not_decide_what_is_usual(lies):
    limit = UpdateNormCheck(None, 1.0)
    for _ in range(10):
        limit.learn(sizes(*lies, *[0.5] * 4))
    limit.check(*sizes(0.6))
    with pytest.raises(ValueError, match="where 0.5 was usual"):
        limit.check(*sizes(FACTOR * 0.5 * 1.01))


def test_a_next_state_that_no_reply_can_have_made_is_refused():
    limit = UpdateNormCheck(None, step=0.1)
    old = {"B": torch.ones(100), "residual": torch.zeros(3)}
    limit.check_state(old, {"B": torch.full((100,), 1.5), "residual": torch.zeros(5)})
    with pytest.raises(ValueError, match="the norm of B would grow by 990"):
        limit.check_state(old, {"B": torch.full((100,), 100.0), "residual": torch.zeros(3)})
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="residual has values that are not finite"):
            limit.check_state(old, {"B": torch.ones(100), "residual": torch.full((9,), bad)})


def test_a_flexlora_product_of_two_large_factors_never_leaves_the_server():
    """Each factor is within a fixed limit, and their product is not finite any more."""
    method, adapters = build("flexlora")
    state = some_state(method, adapters)
    upload = train_client(method, adapters, state, 1.0, 1)
    pot = Aggregate(method, state, UpdateNormCheck(1e30))
    pot.offer({k: torch.full_like(v, 1e28) for k, v in upload.items()}, 1.0)
    with pytest.raises(ValueError, match="expected finite ones|expected at most"):
        pot.close()


def test_a_sketch_that_is_far_larger_than_most_is_left_out():
    sums, honest = (MeansBySize({"x": torch.zeros(3)}) for _ in range(2))
    for seed in range(4):
        one = {"x": 1 + torch.rand(3, generator=torch.Generator().manual_seed(seed))}
        sums.add(one, 1.0)
        honest.add(one, 1.0)
    sums.add({"x": torch.full((3,), 1e9)}, 1.0)
    assert torch.equal(sums.close()["x"], honest.close()["x"])
    assert torch.equal(MeansBySize({"x": torch.ones(3)}).close()["x"], torch.ones(3))


CALIBRATED = [
    ("fed-sb", {}), ("slora", {}), ("ravan", {"init": "first-round"}),
    ("ravan", {"init": "data-aware"}),
]  # fmt: skip


@pytest.mark.parametrize("robust", ["median", "trimmed-mean"])
@pytest.mark.parametrize(("name", "changes"), CALIBRATED)
def test_one_false_reply_of_five_does_not_reach_a_robust_calibration(name, changes, robust):
    method, _ = build(name, **changes)
    key = "sketch" if changes.get("init") == "data-aware" else "change"
    size = method.calibration.bytes_up // 4
    honest = [
        {key: torch.randn(size, generator=torch.Generator().manual_seed(1)) * (1 + n / 1e6)}
        for n in range(4)
    ]
    made = []
    for lies in ([], [{key: -honest[0][key]}]):
        sums = open_calibration(method.calibration, None, 10.0, robust)
        for upload in honest + lies:
            sums.add(upload, 1.0)
        fixed, changed = sums.close()
        made.append(fixed | changed)
    for basis in ("B", "A"):
        torch.testing.assert_close(made[0][basis], made[1][basis], atol=1e-3, rtol=1e-3)


def test_a_calibration_by_steps_is_limited_and_a_sketch_is_not():
    for name, changes in CALIBRATED:
        method, _ = build(name, **changes)
        limited = changes.get("init") != "data-aware"
        sums = open_calibration(method.calibration, None, 0.1)
        key = "change" if limited else "sketch"
        upload = {key: torch.full((method.calibration.bytes_up // 4,), 1.0)}
        if limited:
            with pytest.raises(ValueError, match=r"changes change by 1 .*0.1 = learning-rate"):
                sums.add(upload, 1.0)
        else:
            sums.add(upload, 1.0)
