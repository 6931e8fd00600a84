"""FLASC for every method: sparse messages, dense training, a dense state (arXiv 2406.05233)."""

from fractions import Fraction

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.changes import find_start, take_change
from ravan_flwr.messages.sparsity import densify, sent_sparsely, sparsify
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import Aggregate, upload_from_change
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import build, personal_state, some_state, train_client
from tests.sparse import by_hand

DOWN, UP = Fraction(1, 2), Fraction(1, 4)
ABLE = [name for name, method in METHODS.items() if method.sparse_up and method.sparse_down]


def with_classifier(method, state):
    return state | ({} if method.personal else {CLASSIFIER: torch.linspace(-1, 1, 8)})


def broadcast(method, state, fraction=1.0):
    own = {name: tensor for name, tensor in state.items() if name != CLASSIFIER}
    classifier = {name: tensor for name, tensor in state.items() if name == CLASSIFIER}
    return method.broadcast(own, fraction) | classifier


def trained_from(method, adapters, sent, fraction, seed):
    """Return a client's trained tensors of a broadcast, with the classifier."""
    state_from = {name: tensor for name, tensor in sent.items() if name != CLASSIFIER}
    original = method.broadcast
    method.broadcast = lambda state, fraction: state  # the state is a broadcast already
    try:
        upload = train_client(
            method, adapters, state_from, fraction, seed, personal_state(method, adapters)
        )
    finally:
        method.broadcast = original
    if CLASSIFIER in sent:
        upload[CLASSIFIER] = sent[CLASSIFIER] + torch.linspace(0, seed, 8)
    return upload


@pytest.mark.parametrize("fraction", [1.0, 0.5])
@pytest.mark.parametrize("name", ABLE)
def test_an_upload_is_the_servers_state_plus_the_largest_changes(name, fraction):
    method, adapters = build(name)
    fraction = fraction if method.can_train(fraction) else 1.0
    state = with_classifier(method, some_state(method, adapters))
    sent = broadcast(method, state, fraction)
    names = sent_sparsely(method) & sent.keys()
    got = densify(sparsify(sent, DOWN, names), DOWN)
    for key, tensor in by_hand(sent, DOWN, names).items():
        assert torch.equal(got[key], tensor)
    upload = trained_from(method, adapters, got, fraction, 5)
    change = take_change(method, upload, got)
    arrived = densify(sparsify(change, UP, change.keys()), UP)
    start = find_start(method, upload, sent)
    of_client = find_start(method, upload, got)
    largest = by_hand({k: upload[k] - of_client[k] for k in start}, UP, start.keys())
    for key, tensor in upload_from_change(method, arrived, fraction, state).items():
        expected = start[key] + largest[key] if key in start else upload[key]
        torch.testing.assert_close(tensor, expected, rtol=1e-6, atol=1e-6)


def test_the_next_state_equals_flascs():
    # P <- P + mean_c top(P_c - top(P)), where client c has trained all of P_c.
    method, adapters = build("fedit")
    state = with_classifier(method, some_state(method, adapters))
    start = by_hand(state, DOWN, state.keys())
    total = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    for seed in (3, 4, 5):
        sent = densify(sparsify(state, DOWN, sent_sparsely(method)), DOWN)
        upload = trained_from(method, adapters, sent, 1.0, seed)
        largest = by_hand({k: upload[k] - start[k] for k in state}, UP, state.keys())
        assert any(torch.any(tensor == 0) for tensor in largest.values())
        total = {name: total[name] + largest[name] for name in total}
        change = take_change(method, upload, sent)
        arrived = densify(sparsify(change, UP, change.keys()), UP, max_numbers=10**6)
        sums.check_and_add(upload_from_change(method, arrived, 1.0, state), 1.0)
    for name, tensor in sums.close().items():
        torch.testing.assert_close(tensor, state[name] + total[name] / 3, rtol=1e-6, atol=1e-6)


def test_every_head_sends_a_quarter_of_its_values():
    change = {"H": torch.randn(5, 4, 4, generator=generator(0, "H"))}
    change["H"][0] *= 1e-6  # a head with a small change counts as any other
    arrived = densify(sparsify(change, UP, {"H"}), UP)["H"]
    assert (arrived != 0).flatten(1).sum(1).tolist() == [4] * 5


@pytest.mark.parametrize("name", ABLE)
def test_a_non_finite_value_affects_no_sum(name):
    method, adapters = build(name)
    state = with_classifier(method, some_state(method, adapters))
    sent = broadcast(method, state)
    upload = trained_from(method, adapters, sent, 1.0, 5)
    change = take_change(method, upload, sent)
    floats = [key for key, tensor in change.items() if tensor.is_floating_point()]
    sums = Aggregate(method, state, UpdateNormCheck(None, 1e6))
    for key in floats:
        corrupted = change | {key: torch.full_like(change[key], torch.nan)}
        arrived = densify(sparsify(corrupted, UP, change.keys()), UP, max_numbers=10**6)
        with pytest.raises(ValueError, match="not finite"):
            sums.check_and_add(upload_from_change(method, arrived, 1.0, state), 1.0)
    assert bool(floats) == (name != "local")
    assert sums.count == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"method": "full", "sparsity": "1:1/4"},
        {"weighting": "median", "sparsity": "1/4:1"},
        {"weighting": "krum", "sparsity": "1:1/4", "clients-per-round": 5},
        {"privacy": "client", "epsilon": 8, "sparsity": "1/4:1/16"},
        {"privacy": "example", "epsilon": 8, "sparsity": "0.25:1/16"},
        {"aggregation": "async", "sparsity": "1/4:1/4", "wire": "int8"},
    ],
)
def test_compatible_settings_are_accepted(settings):
    down, up = settings["sparsity"].split(":")
    assert read_config(settings).densities == (Fraction(down), Fraction(up))
