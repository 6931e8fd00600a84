"""FSLoRA, FedMomentum, FRLoRA, FLoRIST and a scale against their definitions, by float64 loops."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.florist import smallest_rank
from ravan_flwr.training.model_and_data import make_method
from tests.methods import (
    LAYERS,
    Network,
    aggregate,
    assert_close,
    build_with_network,
    deltas,
    some_state,
)
from tests.properties.test_newer import factors, loop_product, replies
from tests.reference import leading_part, weighted_mean

CLIENTS = st.lists(
    st.tuples(st.sampled_from([0.1, 0.25, 0.5, 0.75, 1.0]), st.integers(0, 99)),
    min_size=1,
    max_size=5,
)
FULL = st.lists(st.tuples(st.just(1.0), st.integers(0, 99)), min_size=1, max_size=5)
TIGHT = {"rtol": 1e-6, "atol": 1e-6}


# FSLoRA


@given(CLIENTS)
def test_fslora_averages_changes_over_all_clients_zero_where_the_sketch_is(clients):
    method, adapters, _ = build_with_network("fslora", rank=4)
    state = some_state(method, adapters)
    sent = replies(method, adapters, state, clients)
    new = aggregate(method, state, sent)
    for layer, (old_B, old_A) in enumerate(factors(state, 4)):
        B, A = old_B.clone(), old_A.clone()
        total = sum(weight for *_, weight in sent)
        for upload, fraction, weight in sent:
            own_B, own_A = factors(upload, affordable(fraction, 4))[layer]
            drawn = [j for j in range(4) if int(upload["modules"][0]) >> j & 1]
            for place, j in enumerate(drawn):
                B[:, j] += weight / total * (own_B[:, place] - old_B[:, j])
                A[j] += weight / total * (own_A[place] - old_A[j])
        assert_close(factors(new, 4)[layer], (B, A), **TIGHT)


@given(st.integers(0, 99), st.sampled_from([0.25, 0.5, 0.75, 1.0]))
def test_an_fslora_client_computes_with_its_sketch_and_trains_its_ranks_alone(seed, fraction):
    method, adapters, network = build_with_network("fslora", rank=4, lora_scale=0.5)
    pretrained = [network.get_submodule(layer.name).base.weight.double() for layer in LAYERS]
    state = some_state(method, adapters)
    method.load(adapters, state)
    method.choose(
        adapters, fraction, torch.Generator().manual_seed(seed), lambda: pytest.fail("a pass")
    )
    drawn = int(method.upload(adapters)["modules"][0])
    number = affordable(fraction, 4)
    entries = [4 / number if drawn >> j & 1 else 0.0 for j in range(4)]
    assert entries.count(0.0) == 4 - number
    S = torch.diag(torch.tensor(entries, dtype=torch.float64))
    for layer, W, (B, A) in zip(LAYERS, pretrained, factors(state, 4), strict=True):
        module = network.get_submodule(layer.name)
        x = torch.randn(3, layer.in_features, generator=torch.Generator().manual_seed(seed))
        expected = x.double() @ (W + 0.5 * loop_product(loop_product(B, S), A)).T
        assert_close([module(x)], [expected + module.base.bias], **TIGHT)
    trained = [tuple(p.shape) for p in method.parameters(adapters)]
    assert trained == [(6, number), (number, 5), (4, number), (number, 7)]


def test_the_mean_of_fsloras_sketches_is_the_servers_model():
    """Each rank is drawn equally often, so the mean over the draws of B S A is B A."""
    method, adapters, _ = build_with_network("fslora", rank=4)
    state = some_state(method, adapters)
    expected = deltas(method, adapters, state)
    found = {}
    for seed in range(60):
        method.load(adapters, state)
        method.choose(adapters, 0.5, torch.Generator().manual_seed(seed), lambda: None)
        drawn = int(method.upload(adapters)["modules"][0])
        found[drawn] = [delta.double() for delta in method.delta_weights(adapters)]
    assert len(found) == 6  # pairs of four ranks
    means = [torch.stack(each).mean(0) for each in zip(*found.values(), strict=True)]
    assert_close(means, expected, **TIGHT)


# Methods that add to W


def rounds_of(name, rounds):
    """Run rounds of clients; yield the method, the state before, the replies, the state after."""
    method, adapters, _ = build_with_network(name, rank=2, lora_scale=0.5)
    state = method.initial_state(adapters)
    for clients in rounds:
        sent = replies(method, adapters, state, clients)
        before, state = state, aggregate(method, state, sent)
        yield method, before, sent, state


def residuals(method, state):
    """Return what the state adds to the weights of the layers."""
    return [part.dense().double() for part in method.residuals(state)]


def mean_product(sent, layer):
    """Compute mean_c(B_c A_c) of a layer, by the replies' weights."""
    products = [
        loop_product(*factors(upload, affordable(fraction, 2))[layer])
        for upload, fraction, _ in sent
    ]
    return weighted_mean(products, [weight for *_, weight in sent])


# FedMomentum


@given(st.lists(FULL, min_size=1, max_size=3))
def test_fedmomentum_keeps_the_leading_part_in_balanced_factors_and_the_rest_in_w(rounds):
    for method, before, sent, after in rounds_of("fedmomentum", rounds):
        for layer, (old, new) in enumerate(
            zip(residuals(method, before), residuals(method, after), strict=True)
        ):
            M = mean_product(sent, layer)
            B, A = factors(after, 2)[layer]
            kept, rest, size = loop_product(B, A), new - old, M.norm()
            assert_close([0.5 * kept + rest], [0.5 * M], rtol=0, atol=1e-6 * float(size))
            S = torch.linalg.svdvals(M)
            for gram in (B.T @ B, A @ A.T):
                assert_close([gram], [S[:2].diag()], rtol=0, atol=1e-6 * float(size))
            # Of all matrices of rank 2, only the leading part is as near to M as this.
            assert_close([rest.norm()], [0.5 * S[2:].norm()], rtol=0, atol=1e-6 * float(size))


def test_fedmomentums_factors_have_a_gradient_also_if_no_client_moved():
    """With B = 0 in every reply all singular values are zero, and so may not be both factors."""
    method, adapters, _ = build_with_network("fedmomentum", rank=2)
    state = method.initial_state(adapters)
    still = {name: tensor for name, tensor in state.items() if name in ("B", "A")}
    new = aggregate(method, state, [(still, 1.0), (still, 1.0)])
    for B, A in factors(new, 2):
        assert not B.any()
        assert_close([A @ A.T], [torch.eye(2)], **TIGHT)


# FRLoRA


@given(st.lists(FULL, min_size=1, max_size=3))
def test_frlora_adds_the_gain_of_the_means_product_over_the_start(rounds):
    for method, before, sent, after in rounds_of("frlora", rounds):
        weights = [weight for *_, weight in sent]
        for layer, (old, new) in enumerate(
            zip(residuals(method, before), residuals(method, after), strict=True)
        ):
            pairs = [factors(upload, 2)[layer] for upload, *_ in sent]
            B, A = (weighted_mean(each, weights) for each in zip(*pairs, strict=True))
            gain = loop_product(B, A) - loop_product(*factors(before, 2)[layer])
            assert_close([new - old], [0.5 * gain], rtol=1e-6, atol=3e-6)
        assert all(torch.equal(before[name], after[name]) for name in ("B", "A"))


@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_every_frlora_round_starts_from_the_pretrained_weights_principal_directions(scale):
    torch.default_generator.manual_seed(0)
    weights = Network().state_dict()
    pretrained = [weights[f"{layer.name}.weight"].double() for layer in LAYERS]
    method, adapters, network = build_with_network("frlora", rank=2, lora_scale=scale)
    for state in (method.initial_state(adapters), some_state(method, adapters)):
        method.load(adapters, state)
        for W, adapter, added in zip(pretrained, adapters, residuals(method, state), strict=True):
            U, S, Vh = torch.linalg.svd(W)
            principal = loop_product(U[:, :2] @ S[:2].diag(), Vh[:2])
            B, A = adapter.B.detach().double(), adapter.A.detach().double()
            assert_close([scale * loop_product(B, A)], [principal], **TIGHT)
            for gram in (B.T @ B, A @ A.T):
                assert_close([gram], [S[:2].diag() / scale], rtol=1e-6, atol=3e-6)
            # The frozen part makes up for the start: the model is the server's.
            assert_close([adapter.base.weight], [W - principal + added], rtol=1e-6, atol=3e-6)
    assert network.get_submodule("q") is adapters[0]


# FLoRIST


@given(st.lists(CLIENTS, min_size=1, max_size=3))
def test_florist_adds_the_fewest_directions_that_have_the_part_tau_of_the_energy(rounds):
    for method, before, sent, after in rounds_of("florist", rounds):
        ranks = []
        for layer, (old, new) in enumerate(
            zip(residuals(method, before), residuals(method, after), strict=True)
        ):
            M = mean_product(sent, layer)
            kept, p = leading_part(M)
            ranks.append(p)
            assert_close([new - old], [0.5 * kept], rtol=0, atol=3e-6 * float(1 + new.norm()))
        added = (after["residual-rank"] - before["residual-rank"]).tolist()
        assert added == ranks
        # Nothing but the kept directions travels: factors, or the matrix where that is smaller.
        numbers = [
            min(
                rank * (layer.out_features + layer.in_features),
                layer.out_features * layer.in_features,
            )
            for rank, layer in zip(after["residual-rank"].tolist(), LAYERS, strict=True)
        ]
        assert after["residual"].numel() == sum(numbers)
        assert int(after["rounds"]) == int(before["rounds"]) + 1


@pytest.mark.parametrize(
    ("values", "rank"), [([10, 1, 0], 1), ([9.9, 1, 0.1], 2), ([1, 1, 1], 3), ([0, 0, 0], 1)]
)
def test_florists_rank_is_the_smallest_that_reaches_the_threshold(values, rank):
    """100 of 101 is 0.990099; 98.01 of 99.02 is 0.98980: with tau = 0.99 on either side."""
    assert smallest_rank(torch.tensor(values, dtype=torch.float64)) == rank


# SFed-LoRA's scale


@pytest.mark.parametrize(
    ("name", "value", "scale", "recorded"),
    [
        ("fedit", "sqrt-clients", 1.5, "sqrt-clients:1"),
        ("fedit", "sqrt-clients:2", 3.0, "sqrt-clients:2"),
        ("fedit", "sqrt-clients:0.5", 0.75, "sqrt-clients:0.5"),
        ("fedit", 0.5, 0.5, 0.5),
        ("local", "sqrt-clients", 0.5, "sqrt-clients:1"),
    ],
)
def test_sqrt_clients_scales_by_the_root_of_clients_over_rank(name, value, scale, recorded):
    """Nine clients and rank four: sqrt(9 / 4) is 1.5. No mean is taken of local models."""
    settings = {"method": name, "rank": 4, "clients-per-round": 9, "lora-scale": value}
    config = read_config(settings)
    assert config.as_dict()["lora-scale"] == recorded
    method = make_method(config, LAYERS, 0)
    (adapter, _) = method.install(Network(), {})
    adapter.set_factors(torch.ones_like(adapter.B), torch.ones_like(adapter.A))
    assert_close([adapter.delta_weight()], [torch.full((6, 5), scale * 4)], **TIGHT)
