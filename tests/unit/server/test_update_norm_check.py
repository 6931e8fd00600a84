"""The check of update norms, against plain loops and lying clients."""

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
from ravan_flwr.methods.tensors import MeansByNorm
from ravan_flwr.server.aggregation import Aggregate, CalibrationSums
from ravan_flwr.server.update_norm_check import Change, UpdateNormCheck, measure_changes
from tests.methods import build, build_mid_run, some_state, train_client


def size(value):
    """Return the change of a tensor that was zero, with this root mean square."""
    return {"H": Change(value, 0.0, 100)}


@pytest.mark.parametrize("name", METHODS)
@given(fraction=st.sampled_from([0.25, 0.5, 1.0]), seed=st.integers(0, 9))
def test_a_change_is_measured_from_the_clients_broadcast(name, fraction, seed):
    method, adapters = build(name)
    fraction = fraction if method.can_train(fraction) else 1.0
    state = some_state(method, adapters) | {CLASSIFIER: torch.zeros(4)}
    own = {k: v for k, v in state.items() if k != CLASSIFIER}
    method.load(adapters, method.broadcast(own, fraction))
    random = torch.Generator().manual_seed(seed)
    method.choose(adapters, fraction, random, lambda: None)
    still = method.upload(adapters) | {CLASSIFIER: torch.zeros(4)}
    limit = UpdateNormCheck(1e-9)
    sums = Aggregate(method, state, limit)
    sums.check_and_add(still, fraction)  # it changes nothing, for a state of any norm
    moved = {k: v + 0.5 if v.is_floating_point() else v for k, v in still.items()}
    numbers = sum(v.numel() for v in moved.values() if v.is_floating_point())
    message = f"change of norm {0.5 * math.sqrt(numbers):.4g}, expected at most 1e-09"
    with pytest.raises(ValueError, match=message):
        sums.check_and_add(moved, fraction)
    assert sums.count == 1


@given(st.lists(st.floats(-1e3, 1e3, width=32), min_size=1, max_size=9))
def test_the_norm_of_a_change_equals_a_plain_loop(numbers):
    new, old = torch.tensor(numbers), torch.arange(float(len(numbers)))
    (change,) = measure_changes({"x": new}, {"x": old}).values()
    squares = [(a - b) ** 2 for a, b in zip(new.tolist(), old.tolist(), strict=True)]
    assert change.size == pytest.approx(math.sqrt(statistics.mean(squares)), rel=1e-4, abs=1e-6)
    before = math.sqrt(statistics.mean(b * b for b in old.tolist()))
    assert change.before == pytest.approx(before)


@pytest.mark.parametrize("wire", KEYS["wire"].choices)
@given(st.integers(0, 99), st.floats(1e-3, 1e2), st.sampled_from([(3, 5, 7), (2500,), (1,)]))
def test_the_limit_permits_rounding_of_the_wire_and_little_more(wire, seed, scale, shape):
    """A client that trains nothing, with much larger values among others."""
    random = torch.Generator().manual_seed(seed)
    state = {"x": scale * torch.randn(shape, generator=random).pow(3)}
    back = state
    for _ in range(2):
        back = decode(encode(back, wire, random), wire)
    limit = UpdateNormCheck(None, 0.0, wire=wire)
    changes = measure_changes(back, state, wire)
    limit.check(changes)
    most = limit.max_size(changes["x"])
    assert most <= 0.1 * float(state["x"].abs().max()) + 1e-6  # 16 bits have a smallest number
    assert (most == 0) == (wire == "float32")


def test_after_small_updates_a_client_may_move_as_far_as_adam_can():
    """An honest update, however small recent ones were: a limit by recent norms would refuse it."""
    method, adapters = build("full")
    state, limit = method.initial_state(adapters), UpdateNormCheck(None, max_move=0.1)
    for part in [0.001] * 20 + [0.99]:
        sums = Aggregate(method, state, limit)
        sums.check_and_add({k: state[k] + part * 0.1 for k in method.upload(adapters)}, 1.0)
        state = sums.close()


def test_under_local_epochs_each_client_has_its_own_limit():
    limit = UpdateNormCheck(None)
    limit.check(size(0.9 * 1.5 * 0.3 * 1.3), 0.3)
    with pytest.raises(ValueError, match="0.1 = learning-rate x local-steps of its examples allow"):
        limit.check(size(0.9 * 1.5 * 0.3 * 1.3), 0.1)
    old = {"B": torch.ones(100)}
    limit.check_state(old, {"B": torch.full((100,), 5.0)}, max_move=1.0)
    with pytest.raises(ValueError, match="the norm of B would grow by 40"):
        limit.check_state(old, {"B": torch.full((100,), 5.0)}, max_move=0.1)


def test_the_limits_are_those_of_the_documents_to_the_number():
    """By hand: 1.5 x 0.1 x (1 + 0.1), and ten times that reach for a state of 100 numbers."""
    limit = UpdateNormCheck(None, max_move=0.1)
    assert limit.max_size(Change(0.0, 0.0, 1)) == pytest.approx(0.165)
    assert UpdateNormCheck(None).max_size(Change(0.0, 0.0, 1)) == 0
    assert UpdateNormCheck(None).max_size(Change(0.0, 0.0, 1), 0.1) == pytest.approx(0.165)
    for value in (0.0, 0.99 * 0.165):
        limit.check(size(value))
    error = "changes H by .*expected at most 0.165, which is what 0.1 = learning-rate x local"
    with pytest.raises(ValueError, match=error):
        limit.check(size(1.01 * 0.165))
    for numbers, most in ((100, 11.0), (1, 1.1)):
        limit.check_growth("B", torch.zeros(numbers), 0.999 * most)
        with pytest.raises(ValueError, match=f"grow by .*, expected at most {most:.4g}"):
            limit.check_growth("B", torch.zeros(numbers), 1.001 * most)


def test_without_known_steps_no_change_is_allowed():
    limit, old = UpdateNormCheck(None), {"B": torch.ones(100)}
    limit.check(size(0.0))
    limit.check_state(old, old)
    with pytest.raises(ValueError, match="expected at most 0, which is what 0 = learning-rate x"):
        limit.check(size(1e-3))
    for check in (
        lambda: limit.check_state(old, {"B": 1.001 * old["B"]}),
        lambda: limit.check_growth("B", old["B"], 10.01),
    ):
        with pytest.raises(ValueError, match="norm of B would grow by 0.01 .*, expected at most 0"):
            check()


def test_a_given_limit_is_that_of_the_norm_and_of_products_of_changes():
    limit = UpdateNormCheck(2.0)
    limit.check({"x": Change(0.2, 0.0, 100)})  # a norm of 2 to the bit
    with pytest.raises(ValueError, match="a change of norm 2.02, expected at most 2"):
        limit.check({"x": Change(0.202, 0.0, 100)})
    old = torch.tensor([3.0])  # 2 x (1 + 2 + 3) = 12
    limit.check_growth("B", old, 15.0)
    with pytest.raises(ValueError, match="grow by 12.1 in this round, expected at most 12"):
        limit.check_growth("B", old, 15.1)


def test_a_norm_that_the_method_gives_is_no_growth():
    limit, old = UpdateNormCheck(None, max_move=1e-6), {"B": torch.zeros(1)}
    for norm in (5.0, 5.0 * (1 + 5e-7)):
        limit.check_state(old, {"B": torch.tensor([norm])}, {"B": 5.0})
    for norms in ({"B": 4.9}, {}, None):
        with pytest.raises(ValueError, match="the norm of B would grow by"):
            limit.check_state(old, {"B": torch.tensor([0.9 if not norms else 5.0])}, norms)


def test_an_impossible_next_state_is_refused():
    limit = UpdateNormCheck(None, max_move=0.1)
    old = {"B": torch.ones(100), "residual": torch.zeros(3)}
    limit.check_state(old, {"B": torch.full((100,), 1.5), "residual": torch.zeros(5)})
    with pytest.raises(ValueError, match="the norm of B would grow by 990"):
        limit.check_state(old, {"B": torch.full((100,), 100.0), "residual": torch.zeros(3)})
    for bad in (torch.nan, torch.inf):
        with pytest.raises(ValueError, match="residual has values that are not finite"):
            limit.check_state(old, {"B": torch.ones(100), "residual": torch.full((9,), bad)})


def test_a_non_finite_flexlora_product_is_refused():
    """Each factor is within a fixed limit, and their product is not finite."""
    method, adapters, state = build_mid_run("flexlora")
    upload = train_client(method, adapters, state, 1.0, 1)
    sums = Aggregate(method, state, UpdateNormCheck(1e30))
    sums.check_and_add({k: torch.full_like(v, 1e28) for k, v in upload.items()}, 1.0)
    with pytest.raises(ValueError, match="expected finite ones|expected at most"):
        sums.close()


def test_a_sketch_far_larger_than_most_is_excluded():
    sums, honest = (MeansByNorm({"x": torch.zeros(3)}) for _ in range(2))
    for seed in range(4):
        one = {"x": 1 + torch.rand(3, generator=torch.Generator().manual_seed(seed))}
        sums.add(one, 1.0)
        honest.add(one, 1.0)
    sums.add({"x": torch.full((3,), 1e9)}, 1.0)
    assert torch.equal(sums.close()["x"], honest.close()["x"])
    assert torch.equal(MeansByNorm({"x": torch.ones(3)}).close()["x"], torch.ones(3))


CALIBRATED = [
    ("fed-sb", {}), ("slora", {}), ("ravan", {"init": "first-round"}),
    ("ravan", {"init": "data-aware"}),
]  # fmt: skip


@pytest.mark.parametrize("robust", ["median", "trimmed-mean", "krum", "multi-krum"])
@pytest.mark.parametrize(("name", "changes"), CALIBRATED)
def test_one_false_reply_of_five_does_not_affect_a_robust_calibration(name, changes, robust):
    method, _ = build(name, **changes)
    key = "sketch" if changes.get("init") == "data-aware" else "change"
    size = method.calibration.bytes_up // 4
    honest = [
        {key: torch.randn(size, generator=torch.Generator().manual_seed(1)) * (1 + n / 1e6)}
        for n in range(5)
    ]
    results = []
    for lies in ([], [{key: -honest[0][key]}]):
        sums = CalibrationSums(method.calibration, None, 10.0, robust)
        for upload in honest + lies:
            sums.add(upload, 1.0)
        fixed, changed = sums.close()
        results.append(fixed | changed)
    for basis in ("B", "A"):
        torch.testing.assert_close(results[0][basis], results[1][basis], atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("name", "changes"), CALIBRATED)
def test_a_calibration_by_steps_is_limited_and_a_sketch_is_not(name, changes):
    method, _ = build(name, **changes)
    sums = CalibrationSums(method.calibration, None, 0.1)
    ones = torch.full((method.calibration.bytes_up // 4,), 1.0)
    if changes.get("init") == "data-aware":
        sums.add({"sketch": ones}, 1.0)
    else:
        with pytest.raises(ValueError, match=r"changes change by 1 .*0.1 = learning-rate"):
            sums.check_and_add({"change": ones}, 1.0)


def test_a_given_norm_limits_changes_and_no_gradients():
    """`max-update-norm` is of an update; a sketch of gradients has another scale."""
    for name, changes in CALIBRATED:
        method, _ = build(name, **changes)
        sums = CalibrationSums(method.calibration, 0.5, 10.0)
        ones = torch.full((method.calibration.bytes_up // 4,), 1.0)
        if changes.get("init") == "data-aware":
            sums.check({"sketch": ones})
        else:
            with pytest.raises(ValueError, match=r"0\.5"):
                sums.check({"change": ones})


def test_a_sketch_of_zeros_is_not_large():
    sums = MeansByNorm({"x": torch.ones(2)})
    for values in ([0.0, 0.0], [0.01, 0.03], [0.02, 0.0]):
        sums.add({"x": torch.tensor(values)}, 1.0)
    torch.testing.assert_close(sums.close()["x"], torch.tensor([0.01, 0.01]))
