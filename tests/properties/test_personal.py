"""Personal parameters stay with their client, and equal what the paper's loop makes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import generator
from tests.methods import (
    LAYERS,
    aggregate,
    assert_close,
    build,
    deltas,
    personal_state,
    some_state,
    train_client,
)

PERSONAL = [name for name, listed in METHODS.items() if listed.personalised]
every_personal = pytest.mark.parametrize("name", PERSONAL)


def test_a_method_says_that_it_is_personalised_where_something_stays():
    for name in METHODS:
        method, _ = build(name)
        assert (method.personal is not None) == METHODS[name].personalised


@every_personal
def test_what_stays_and_what_travels_are_all_that_is_trained(name):
    method, adapters = build(name)
    state = some_state(method, adapters)
    upload = train_client(method, adapters, state, 1.0, 3)
    own = personal_state(method, adapters)
    assert not upload.keys() & own.keys()
    assert {k: tuple(v.shape) for k, v in own.items()} == method.personal.shapes
    if METHODS[name].has_heads:
        return  # FedALT's products travel and stay: test_fedalt.py
    measured = {"mean-input"}  # what no gradient trains
    sizes = [t.numel() for k, t in (upload | own).items() if k not in measured]
    assert sum(sizes) == method.trainable_parameters()


@every_personal
def test_a_part_comes_back_to_the_bit_and_shares_nothing(name):
    method, adapters = build(name)
    state = some_state(method, adapters)
    train_client(method, adapters, state, 1.0, 3)
    own = personal_state(method, adapters)
    kept = {key: tensor.clone() for key, tensor in own.items()}
    before = deltas(method, adapters, state, own)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.fill_(7.0)
    assert all(torch.equal(own[key], kept[key]) for key in own)
    assert all(map(torch.equal, deltas(method, adapters, state, own), before))
    again = personal_state(method, adapters)
    if name != "fedalt":  # which has settled by then what the server's mean has of it
        assert all(torch.equal(again[key], kept[key]) for key in own)
    assert all(map(torch.equal, deltas(method, adapters, state, again), before))


@every_personal
def test_a_client_sees_nothing_of_anothers_part(name):
    method, adapters = build(name)
    state = some_state(method, adapters)
    alone = train_client(method, adapters, state, 1.0, 3), personal_state(method, adapters)
    train_client(method, adapters, state, 1.0, 4)
    other = personal_state(method, adapters)
    train_client(method, adapters, state, 1.0, 5, other)
    again = train_client(method, adapters, state, 1.0, 3), personal_state(method, adapters)
    for one, two in zip(alone, again, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


@every_personal
def test_a_client_without_a_part_begins_as_all_do(name):
    method, adapters = build(name)
    state = some_state(method, adapters)
    before = deltas(method, adapters, state)
    assert any(delta.any() for delta in before) == METHODS[name].serves
    train_client(method, adapters, state, 1.0, 3)
    assert all(map(torch.equal, deltas(method, adapters, state), before))


@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
def test_fedsa_lora_is_the_papers_loop(seeds):
    """In float64, client by client and layer by layer: A <- mean A_c, and B_c stays."""
    method, adapters = build("fedsa-lora")
    state = method.initial_state(adapters)
    own: dict[int, dict[str, torch.Tensor]] = {}
    slow_A = [adapter.A.detach().double() for adapter in adapters]
    slow_B = {
        seed: [torch.zeros(layer.out_features, 2, dtype=torch.float64) for layer in LAYERS]
        for seed in seeds
    }
    for number in range(3):
        uploads = []
        new_A: dict[int, list[torch.Tensor]] = {}
        for seed in seeds:
            moves = 100 * number + seed
            uploads.append((train_client(method, adapters, state, 1.0, moves, own.get(seed)), 1.0))
            own[seed] = personal_state(method, adapters)
            # The same movement as in `train_client`: of each layer's parameters in their order.
            random = generator(moves, "client")
            new_A[seed] = []
            for place, adapter in enumerate(adapters):
                for factor in adapter.parameters():
                    if not factor.requires_grad:
                        continue
                    move = torch.randn(factor.shape, generator=random).double()
                    if factor is adapter.B:
                        slow_B[seed][place] = slow_B[seed][place] + move
                    else:
                        new_A[seed].append(slow_A[place] + move)
        slow_A = [
            sum(new_A[seed][place] for seed in seeds) / len(seeds) for place in range(len(LAYERS))
        ]
        state = aggregate(method, state, uploads)
        for seed in seeds:
            products = [B @ A for B, A in zip(slow_B[seed], slow_A, strict=True)]
            assert_close(deltas(method, adapters, state, own[seed]), products)


def test_local_is_fedit_of_one_client():
    """Alone, FedIT's client goes on from its own mean: that is what `local` does."""
    method, adapters = build("local")
    fedit, others = build("fedit")
    own, state = None, fedit.initial_state(others)
    for seed in range(3):
        assert train_client(method, adapters, {}, 1.0, seed, own) == {}
        own = personal_state(method, adapters)
        state = aggregate(fedit, state, [(train_client(fedit, others, state, 1.0, seed), 1.0)])
        assert all(torch.equal(own[key], state[key]) for key in state)


def test_centralised_is_fedit_of_one_client():
    found = []
    for name in ("centralised", "fedit"):
        method, adapters = build(name)
        state = method.initial_state(adapters)
        for seed in range(3):
            state = aggregate(
                method, state, [(train_client(method, adapters, state, 1.0, seed), 1.0)]
            )
        found.append(state)
    assert all(torch.equal(found[0][key], found[1][key]) for key in found[1])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"method": "fedsa-lora", "evaluate-on": "server"}, "evaluate-on = 'server': got method"),
        ({"method": "local", "evaluate-on": "server"}, "each client has a model of its own"),
        ({"method": "local", "validation-share": 0.0}, "needs examples to evaluate on"),
        ({"method": "local", "server-optimizer": "adam"}, "got method 'local'"),
        ({"method": "centralised", "weighting": "median"}, "got method 'centralised'"),
        ({"method": "centralised", "local-epochs": 1.0}, "local-epochs = 1.0: got method"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(settings, told):
    with pytest.raises(ValueError, match=told):
        read_config(settings)


@every_personal
def test_an_upload_with_what_should_stay_is_refused(name):
    method, adapters = build(name)
    state = some_state(method, adapters)
    upload = train_client(method, adapters, state, 1.0, 3)
    with pytest.raises(ValueError, match="got tensors .*expected"):
        aggregate(method, state, [(upload | personal_state(method, adapters), 1.0)])
