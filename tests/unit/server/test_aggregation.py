"""A round's sums, and the server's state between rounds."""

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import KEPT_BROADCASTS, Aggregate, ServerState
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from ravan_flwr.training.adapted_model import FINGERPRINT
from tests.methods import build, calibration_sums, train_client


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


def test_a_trained_classifier_has_the_form_of_the_servers():
    method, adapters = build("fedit")
    state = method.initial_state(adapters)
    sums = Aggregate(method, state | {CLASSIFIER: torch.zeros(6)}, UpdateNormCheck(1e9))
    upload = train_client(method, adapters, state, 1.0, 0)
    for wrong in (torch.zeros(5), torch.zeros(6, dtype=torch.float64)):
        with pytest.raises(ValueError, match="classifier"):
            sums.check_and_add(upload | {CLASSIFIER: wrong}, 1.0)
    sums.check_and_add(upload | {CLASSIFIER: torch.full((6,), 4.0)}, 1.0)
    assert torch.equal(sums.close()[CLASSIFIER], torch.full((6,), 4.0))


def test_the_tensors_of_a_calibration_have_its_names():
    method, _ = build("ravan", init="data-aware")
    sums = calibration_sums(method)
    form = {"sketch": torch.ones(sum(method.calibration.sizes))}
    sums.check_form(form)
    with pytest.raises(ValueError, match=r"got tensors \['other', 'sketch'\]"):
        sums.check_form(form | {"other": torch.ones(1)})


def test_a_calibration_has_the_mean_of_what_its_clients_sent():
    method, _ = build("slora")
    numbers = torch.randn(method.calibration.bytes_up // 4, generator=generator(3))
    apart, at_once = calibration_sums(method), calibration_sums(method)
    for part, weight in ((0.5, 1.0), (2.0, 2.0)):
        apart.check_and_add({"change": part * numbers}, weight)
    at_once.check_and_add({"change": 1.5 * numbers}, 1.0)
    for one, other in zip(apart.close(), at_once.close(), strict=True):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            torch.testing.assert_close(tensor, other[name])


def make_state(tensors, memory=None, **settings):
    config = read_config({"method": "fedit", "learning-rate": 0.01, "local-steps": 5, **settings})
    return ServerState(config, [1.0], tensors, memory or {})


MOMENTUM = {"server-optimizer": "momentum:1:0.5"}
START = {"A": torch.zeros(2), "B": torch.zeros(3)}
ONE = {"A": torch.ones(2), "B": torch.ones(3)}


def test_a_resumed_state_continues_with_its_moments():
    """A step of momentum 0.5 from zero to ones leaves a velocity of one, of which half remains."""
    state = make_state(START, **MOMENTUM)
    state.step(ONE)
    resumed = make_state(state.tensors, state.memory, **MOMENTUM)
    for one in (state, resumed):
        one.step(ONE)  # no change of its own
        assert all(torch.equal(x, torch.full_like(x, 1.5)) for x in one.tensors.values())
    moments = {"server-optimizer/A/momentum_buffer", "server-optimizer/B/momentum_buffer"}
    assert state.memory.keys() == resumed.memory.keys() == moments | {FINGERPRINT}


def test_frozen_tensors_keep_their_moments_and_take_no_step():
    state = make_state(START, **MOMENTUM)
    state.step(ONE)
    state.step(ONE, frozen=("A",))
    assert torch.equal(state.tensors["A"], torch.ones(2))
    assert torch.equal(state.tensors["B"], torch.full((3,), 1.5))
    state.step(state.tensors)  # A continues with its velocity of one, B with one of a half
    assert torch.equal(state.tensors["A"], torch.full((2,), 1.5))
    assert torch.equal(state.tensors["B"], torch.full((3,), 1.75))


@pytest.mark.parametrize(("steps", "allowed"), [(5, "0.05"), (50, "0.5")])
def test_clients_move_no_further_than_rate_times_steps(steps, allowed):
    method, adapters = build("fedit")
    state = method.initial_state(adapters)
    sums = make_state(state, **{"local-steps": steps}).open_sums(method)
    far = {name: tensor + 10.0 for name, tensor in method.broadcast(state, 1.0).items()}
    with pytest.raises(ValueError, match=f"which is what {allowed} = learning-rate x local-steps"):
        sums.check_and_add(far, 1.0)
