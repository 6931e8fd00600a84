"""Personal parameters stay with their client, and equal those of the papers' loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import generator
from tests.methods import (
    LAYERS,
    aggregate,
    assert_close,
    build,
    build_mid_run,
    deltas,
    personal_state,
    train_client,
)

PERSONAL = [name for name, listed in METHODS.items() if listed.personalised]
every_personal = pytest.mark.parametrize("name", PERSONAL)


def test_methods_with_personal_parameters_are_marked_as_personalised():
    for name in METHODS:
        method, _ = build(name)
        assert (method.personal is not None) == METHODS[name].personalised


@every_personal
def test_upload_and_personal_parameters_are_all_trained_parameters(name):
    method, adapters, state = build_mid_run(name)
    upload = train_client(method, adapters, state, 1.0, 3)
    own = personal_state(method, adapters)
    assert not upload.keys() & own.keys()
    assert {k: tuple(v.shape) for k, v in own.items()} == method.personal.shapes
    if METHODS[name].has_heads:
        return  # FedALT's products are sent and kept: test_fedalt.py
    untrained = {"mean-input"}  # not trained by a gradient
    sizes = [t.numel() for k, t in (upload | own).items() if k not in untrained]
    assert sum(sizes) == method.trainable_parameters()


@every_personal
def test_personal_parameters_are_restored_to_the_bit_and_share_no_memory(name):
    method, adapters, state = build_mid_run(name)
    train_client(method, adapters, state, 1.0, 3)
    own = personal_state(method, adapters)
    copies = {key: tensor.clone() for key, tensor in own.items()}
    before = deltas(method, adapters, state, own)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.fill_(7.0)
    assert all(torch.equal(own[key], copies[key]) for key in own)
    assert all(map(torch.equal, deltas(method, adapters, state, own), before))
    again = personal_state(method, adapters)
    if name != "fedalt":  # FedALT has by then subtracted its contribution to the server's mean
        assert all(torch.equal(again[key], copies[key]) for key in own)
    assert all(map(torch.equal, deltas(method, adapters, state, again), before))


@every_personal
def test_a_client_does_not_depend_on_anothers_personal_parameters(name):
    method, adapters, state = build_mid_run(name)
    alone = train_client(method, adapters, state, 1.0, 3), personal_state(method, adapters)
    train_client(method, adapters, state, 1.0, 4)
    other = personal_state(method, adapters)
    train_client(method, adapters, state, 1.0, 5, other)
    again = train_client(method, adapters, state, 1.0, 3), personal_state(method, adapters)
    for one, two in zip(alone, again, strict=True):
        assert all(torch.equal(one[key], two[key]) for key in one)


@every_personal
def test_a_new_client_starts_from_the_common_state(name):
    method, adapters, state = build_mid_run(name)
    before = deltas(method, adapters, state)
    assert any(delta.any() for delta in before) == METHODS[name].serves
    train_client(method, adapters, state, 1.0, 3)
    assert all(map(torch.equal, deltas(method, adapters, state), before))


@given(seeds=st.lists(st.integers(0, 99), min_size=1, max_size=4, unique=True))
def test_fedsa_lora_equals_the_papers_loop(seeds):
    """In float64, client by client and layer by layer: A <- mean A_c, and B_c stays."""
    method, adapters = build("fedsa-lora")
    state = method.initial_state(adapters)
    own: dict[int, dict[str, torch.Tensor]] = {}
    loop_A = [adapter.A.detach().double() for adapter in adapters]
    loop_B = {
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
            # The same random updates as in `train_client`, in the order of layers and parameters.
            random = generator(moves, "client")
            new_A[seed] = []
            for place, adapter in enumerate(adapters):
                for factor in adapter.parameters():
                    if not factor.requires_grad:
                        continue
                    move = torch.randn(factor.shape, generator=random).double()
                    if factor is adapter.B:
                        loop_B[seed][place] = loop_B[seed][place] + move
                    else:
                        new_A[seed].append(loop_A[place] + move)
        loop_A = [
            sum(new_A[seed][place] for seed in seeds) / len(seeds) for place in range(len(LAYERS))
        ]
        state = aggregate(method, state, uploads)
        for seed in seeds:
            products = [B @ A for B, A in zip(loop_B[seed], loop_A, strict=True)]
            assert_close(deltas(method, adapters, state, own[seed]), products)


def test_local_and_centralised_equal_fedit_of_one_client():
    """FedIT with one client continues from its own mean, as `local` does."""
    local, of_local = build("local")
    pooled, of_pooled = build("centralised")
    fedit, others = build("fedit")
    own, state = None, fedit.initial_state(others)
    same = pooled.initial_state(of_pooled)
    for seed in range(3):
        assert train_client(local, of_local, {}, 1.0, seed, own) == {}
        own = personal_state(local, of_local)
        state = aggregate(fedit, state, [(train_client(fedit, others, state, 1.0, seed), 1.0)])
        same = aggregate(pooled, same, [(train_client(pooled, of_pooled, same, 1.0, seed), 1.0)])
        for found in (own, same):
            assert all(torch.equal(found[key], state[key]) for key in state)


@every_personal
def test_an_upload_with_personal_parameters_is_refused(name):
    method, adapters, state = build_mid_run(name)
    upload = train_client(method, adapters, state, 1.0, 3)
    with pytest.raises(ValueError, match="got tensors .*expected"):
        aggregate(method, state, [(upload | personal_state(method, adapters), 1.0)])
