"""Properties of all methods: messages, aggregation, and refusals."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.adapters import Layer
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import CLASSIFIER
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import (
    INEXACT,
    LAYERS,
    aggregate,
    assert_close,
    build,
    build_mid_run,
    build_with_network,
    deltas,
    personal_state,
    some_state,
    train_client,
)
from tests.reference import leading_part

SHARES = st.sampled_from([0.25, 0.5, 0.75, 1.0])
CLIENTS = st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5)
SIDES = st.integers(2, 7)
NETWORKS = st.lists(st.tuples(SIDES, SIDES), min_size=1, max_size=3).map(
    lambda sides: tuple(Layer(f"layer{i}", *pair) for i, pair in enumerate(sides))
)
every_method = pytest.mark.parametrize("name", METHODS)


@every_method
@given(NETWORKS, st.integers(0, 99))
def test_a_layer_computes_its_pretrained_weight_plus_the_delta_weight(name, layers, seed):
    method, adapters, network = build_with_network(name, layers)
    pretrained = [_weight_of(network, layer) for layer in layers]
    train_client(method, adapters, some_state(method, adapters), 1.0, seed)
    for adapter in adapters:
        if hasattr(adapter, "gate"):  # FedALT mixes by input, which is no matrix
            adapter.gate.data.zero_()
    computed = [_weight_of(network, layer) for layer in layers]
    expected = [w + d for w, d in zip(pretrained, method.delta_weights(adapters), strict=True)]
    assert_close(computed, expected)


def _weight_of(network, layer):
    """Compute the matrix of a layer from its outputs for unit vectors."""
    module = network.get_submodule(layer.name)
    with torch.no_grad():
        zero = module(torch.zeros(1, layer.in_features))
        return (module(torch.eye(layer.in_features)) - zero).T.clone()


@every_method
@given(CLIENTS, st.randoms())
def test_the_order_of_replies_does_not_matter(name, clients, shuffler):
    method, adapters, state = build_mid_run(name)
    uploads = [(train_client(method, adapters, state, s, seed), s) for s, seed in clients]
    once = aggregate(method, state, uploads)
    shuffler.shuffle(uploads)
    again = aggregate(method, state, uploads)
    assert once.keys() == again.keys()
    assert_close(deltas(method, adapters, once), deltas(method, adapters, again))
    if METHODS[name].averages:
        assert all(torch.equal(once[key], again[key]) for key in once)


@every_method
def test_unchanged_clients_leave_the_state_unchanged(name):
    method, adapters, state = build_mid_run(name)
    before = deltas(method, adapters, state)
    uploads = []
    for _ in range(3):
        method.load(adapters, method.broadcast(state, 1.0))
        method.choose(adapters, 1.0, torch.Generator(), lambda: None)
        uploads.append((method.upload(adapters), 1.0))
    after = deltas(method, adapters, aggregate(method, state, uploads))
    assert_close(after, before)


@every_method
@given(NETWORKS, st.integers(0, 99), st.sampled_from([1.0, 0.5]))
def test_a_single_client_gets_its_own_delta_weight(name, layers, seed, scale):
    method, adapters, state = build_mid_run(name, layers=layers, lora_scale=scale)
    upload = train_client(method, adapters, state, 1.0, seed)
    own = [delta.clone() for delta in method.delta_weights(adapters)]
    part = personal_state(method, adapters)
    if name == "florist":  # of a round's change it keeps the leading part alone
        before = deltas(method, adapters, state)
        own = [b + leading_part(o - b)[0] for b, o in zip(before, own, strict=True)]
    new = aggregate(method, state, [(upload, 1.0)])
    assert_close(deltas(method, adapters, new, part), own)


@pytest.mark.parametrize("name", [name for name in METHODS if name not in INEXACT])
@given(NETWORKS, st.lists(st.integers(0, 99), min_size=1, max_size=4), st.sampled_from([1.0, 0.5]))
def test_the_aggregates_delta_weight_is_the_mean_of_the_clients(name, layers, seeds, scale):
    method, adapters, state = build_mid_run(name, layers=layers, lora_scale=scale)
    for _ in range(2):  # the second round begins at the end of the first
        uploads, each = [], []
        for seed in seeds:
            uploads.append((train_client(method, adapters, state, 1.0, seed), 1.0))
            each.append([delta.clone() for delta in method.delta_weights(adapters)])
        state = aggregate(method, state, uploads)
        means = [torch.stack(layer).mean(0) for layer in zip(*each, strict=True)]
        assert_close(deltas(method, adapters, state), means)


@every_method
@given(st.lists(st.tuples(SHARES, st.integers(1, 4)), min_size=1, max_size=4))
def test_a_weight_equals_repeated_replies(name, clients):
    if "weighting" in METHODS[name].ignores:
        clients = [(fraction, 1) for fraction, _ in clients]
    method, adapters, state = build_mid_run(name)
    weighted, repeated = [], []
    for seed, (fraction, weight) in enumerate(clients):
        upload = train_client(method, adapters, state, fraction, seed)
        weighted.append((upload, fraction, float(weight)))
        repeated += weight * [(upload, fraction)]
    one, other = (aggregate(method, state, uploads) for uploads in (weighted, repeated))
    assert_close(deltas(method, adapters, one), deltas(method, adapters, other))


@every_method
@pytest.mark.parametrize("fraction", [0.25, 1.0])
def test_messages_round_trip_with_the_computed_number_of_bytes(name, fraction):
    method, adapters = build(name)
    fraction = fraction if method.can_train(fraction) else 1.0
    state = some_state(method, adapters)
    upload = train_client(method, adapters, state, fraction, 3)
    for tensors in (state, method.broadcast(state, fraction), upload):
        arrived = from_record(to_record(tensors))
        assert {k: (v.dtype, v.shape) for k, v in arrived.items()} == {
            k: (v.dtype, v.shape) for k, v in tensors.items()
        }
        assert all(torch.equal(arrived[key], tensors[key]) for key in tensors)
    assert sum(t.nbytes for t in upload.values()) == method.upload_bytes(fraction)
    sent = sum(t.nbytes for t in method.broadcast(state, fraction).values())
    assert sent <= method.broadcast_bytes(method.initial_state(adapters), fraction)


@every_method
def test_a_smaller_budget_fraction_trains_and_sends_less_or_nothing(name):
    method, adapters = build(name)
    if method.budget_units is None:
        able = [method.can_train(fraction) for fraction in (0.25, 0.99, 1.0)]
        assert able == [False, False, True]
        return
    sizes, sent = [], []
    for fraction in (0.5, 1.0):
        upload = train_client(method, adapters, method.initial_state(adapters), fraction, 0)
        # Gates are not part of a head.
        gates = sum(a.gate.numel() for a in adapters if hasattr(a, "gate"))
        sizes.append(sum(p.numel() for p in method.parameters(adapters)) - gates)
        sent.append(sum(t.nbytes for t in upload.values()))
    assert method.can_train(0.01)
    assert sizes[0] <= sizes[1] / 2
    assert sizes[1] == method.trainable_parameters() - gates
    assert sent[0] < 0.55 * sent[1]


@every_method
def test_the_network_is_restored_to_the_bit(name):
    method, adapters, network = build_with_network(name)
    rest = {k: v.clone() for k, v in network.state_dict().items()}
    initial = method.initial_state(adapters)
    method.load(adapters, initial)
    before = {k: v.clone() for k, v in network.state_dict().items()}
    state = some_state(method, adapters)
    train_client(method, adapters, state, 0.5, 1)
    method.load(adapters, initial)
    after = network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    method.load(adapters, method.idle_state(adapters))
    after = network.state_dict()
    assert all(torch.equal(rest[key], after[key]) for key in rest if key in after)


@every_method
def test_messages_share_no_memory_with_the_model(name):
    method, adapters, state = build_mid_run(name)
    copies = {k: v.clone() for k, v in state.items()}
    upload = train_client(method, adapters, state, 1.0, 3)
    sent = {k: v.clone() for k, v in upload.items()}
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.fill_(7.0)
    assert all(torch.equal(state[key], copies[key]) for key in state)
    assert all(torch.equal(upload[key], sent[key]) for key in upload)


@every_method
def test_lora_factors_are_the_delta_weight_or_the_weights_have_changed(name):
    method, adapters, network = build_with_network(name, lora_scale=0.5)
    rest = pretrained_weights(network)
    expected = deltas(method, adapters, some_state(method, adapters))
    factors = [method.lora_factors(adapter) for adapter in adapters]
    if METHODS[name].mixes:  # no product of two factors mixes inputs
        assert factors == [None] * len(adapters)
    elif all(map(torch.equal, rest, pretrained_weights(network))):
        assert_close([B @ A for B, A in factors], expected)
    else:
        assert factors == [None] * len(adapters)


def pretrained_weights(network):
    """Return the current weights of the adapted layers."""
    modules = [network.get_submodule(layer.name) for layer in LAYERS]
    return [getattr(module, "base", module).weight.detach().clone() for module in modules]


@every_method
@given(st.integers(1, 40), NETWORKS)
def test_the_rank_is_the_largest_within_the_budget(name, lora_rank, layers):
    lora_rank += name in ("feddpa", "fedalt")  # they have two LoRAs, or gates
    if name in ("full", "none"):  # of which `none` trains nothing: test_no_adapter.py
        method, adapters = build(name, lora_rank=lora_rank, layers=layers)
        method.load(adapters, method.initial_state(adapters))
        trained = sum(p.numel() for p in method.parameters(adapters))
        assert method.trainable_parameters() == trained
        assert name == "none" or method.rank is None
        return
    heads = {"heads": 1} if METHODS[name].has_heads else {}
    method, adapters = build(name, rank=None, lora_rank=lora_rank, layers=layers, **heads)
    method.load(adapters, method.initial_state(adapters))
    trained = sum(p.numel() for p in method.parameters(adapters))
    assert trained == method.trainable_parameters() <= method.budget
    side = min(min(layer.out_features, layer.in_features) for layer in layers)
    if method.rank < side:
        bigger, _ = build(name, rank=method.rank + 1, lora_rank=lora_rank, layers=layers, **heads)
        assert bigger.trainable_parameters() > method.budget


@pytest.mark.parametrize("name", [name for name in METHODS if name not in ("full", "none")])
def test_a_rank_beyond_the_matrices_is_refused(name):
    with pytest.raises(ValueError, match=r"rank = 5: .*expected at most 4; lower rank"):
        build(name, rank=5)


@every_method
def test_fingerprints_depend_on_the_seed_but_not_on_trained_tensors(name):
    method, adapters = build(name)
    before = method.fingerprint(adapters)
    train_client(method, adapters, some_state(method, adapters), 0.5, 1)
    method.load(adapters, method.idle_state(adapters))
    assert method.fingerprint(adapters) == before
    other, others = build(name, seed=1)
    pairs = zip(tensors_of(adapters), tensors_of(others), strict=True)
    same = all(torch.equal(one, two) for one, two in pairs)  # nothing is made from the seed
    message = "override fingerprint: it tells apart what seeds make, and nothing else"
    assert (other.fingerprint(others) == pytest.approx(before, rel=1e-3)) == same, message


def tensors_of(adapters):
    return [t for adapter in adapters for t in (*adapter.parameters(), *adapter.buffers())]


BAD_TENSORS = {
    "another shape": lambda tensor: torch.cat([tensor, tensor]),
    "broadcastable": lambda tensor: tensor[:1],
    "another dtype": lambda tensor: tensor.double(),
    "not a number": lambda tensor: tensor + torch.nan,
    "infinite": lambda tensor: tensor - torch.inf,
    "missing": lambda tensor: None,
    "huge": lambda tensor: tensor + 1e30,
}


@every_method
@pytest.mark.parametrize("case", BAD_TENSORS)
def test_an_invalid_upload_is_rejected_and_leaves_the_sums_unchanged(name, case):
    method, adapters, state = build_mid_run(name)
    good = train_client(method, adapters, state, 1.0, 1)
    for key in (key for key, tensor in good.items() if tensor.is_floating_point()):
        changed = BAD_TENSORS[case](good[key])
        bad = {k: changed if k == key else v for k, v in good.items()}
        sums = Aggregate(method, state, UpdateNormCheck(1e9))
        with pytest.raises(ValueError, match="expected"):
            sums.check_and_add({k: v for k, v in bad.items() if v is not None}, 1.0)
        with pytest.raises(ValueError, match="expected"):
            sums.check_and_add(good | {"x": torch.zeros(1)}, 1.0)
        sums.check_and_add(good, 1.0)
        assert sums.count == 1
        expected = aggregate(method, state, [(good, 1.0)])
        assert all(torch.equal(v, expected[k]) for k, v in sums.close().items())


@every_method
def test_the_classifier_is_averaged_over_all_clients(name):
    method, adapters = build(name)
    initial = method.initial_state(adapters)
    state = initial | {CLASSIFIER: torch.zeros(3)}
    uploads = []
    for value, fraction, weight in ((1.0, 1.0, 1.0), (2.0, 0.4, 2.0), (7.0, 0.4, 1.0)):
        upload = train_client(method, adapters, initial, fraction, int(value))
        uploads.append((upload | {CLASSIFIER: torch.full((3,), value)}, fraction, weight))
    assert aggregate(method, state, uploads)[CLASSIFIER].tolist() == [3.0, 3.0, 3.0]
    with pytest.raises(ValueError, match=r"got tensors .*'classifier'.*, expected"):
        aggregate(method, initial, uploads[:1])


@every_method
def test_a_round_without_replies_keeps_the_state(name):
    method, _, state = build_mid_run(name)
    new = aggregate(method, state, [])
    assert all(torch.equal(new[key], state[key]) for key in state)


def test_an_unknown_method_lists_the_methods():
    expected = f"method 'ravn' is unknown; expected one of {', '.join(METHODS)}$"
    with pytest.raises(ValueError, match=expected):
        get_method("ravn")


def test_layers_draw_different_values_from_one_seed():
    """Two layers of one shape must not start alike."""
    layers = (Layer("one", 4, 4), Layer("two", 4, 4))
    for name in ("fedit", "ffa-lora", "ravan"):
        _, (one, two) = build(name, layers=layers)
        assert not torch.equal(one.A, two.A)


@every_method
def test_a_small_budget_is_sent_the_same_as_others_unless_the_method_says_so(name):
    method, _, state = build_mid_run(name)
    whole, small = (method.broadcast(state, fraction) for fraction in (1.0, 0.5))
    same = all(torch.equal(small[key], tensor) for key, tensor in whole.items())
    assert same != method.cuts_broadcast
