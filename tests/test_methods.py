"""The laws of the methods: what travels, what the server makes of it, and what it refuses."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import Layer
from ravan_flwr.aggregation import Aggregate
from ravan_flwr.budgets import affordable
from ravan_flwr.methods import METHODS, get_method
from ravan_flwr.methods.base import CLASSIFIER, Settings
from ravan_flwr.methods.ravan import Ravan, _pack_bits, _unpack_bits
from ravan_flwr.payload import from_record, to_record
from ravan_flwr.seeding import generator
from tests.reference import head_means, multihead_delta

LAYERS = [Layer("q", 6, 5), Layer("v", 4, 7)]  # rectangular, both ways
SETTINGS = Settings(
    seed=0, lora_rank=2, rank=2, heads=3, init="normal", init_scale=1.0, calibration_steps=2,
    scaling="trained", scoring="random", selection="layer",
)  # fmt: skip
SHARES = st.sampled_from([0.25, 0.5, 0.75, 1.0])


def build(name="ravan", **changes):
    method = get_method(name)(dataclasses.replace(SETTINGS, **changes), LAYERS)
    torch.manual_seed(0)
    adapters = [
        method.adapt(layer, nn.Linear(layer.in_features, layer.out_features)) for layer in LAYERS
    ]
    return method, adapters


def train_client(method, adapters, state, share, seed):
    """What one client sends, after some arbitrary movement of what it may train."""
    random = generator(seed, "client")
    method.load(adapters, method.broadcast(state, share))
    method.choose(adapters, share, random, lambda: None)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.add_(torch.randn(parameter.shape, generator=random))
    return method.upload(adapters)


def deltas(method, adapters, state):
    method.load(adapters, state)
    return [adapter.delta_weight().detach().double() for adapter in adapters]


def aggregate(method, state, uploads):
    aggregate = Aggregate(method, state, max_norm=1e9)
    for upload, share in uploads:
        aggregate.offer(upload, share)
    return aggregate.close()


def random_state(method, seed):
    random = generator(seed, "state")
    return {
        name: torch.randn(tensor.shape, generator=random)
        for name, tensor in method.initial_state().items()
    }


@pytest.mark.parametrize("name", METHODS)
@given(st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5), st.randoms())
def test_the_order_of_replies_does_not_matter(name, clients, shuffler):
    method, adapters = build(name)
    state = random_state(method, 1)
    uploads = [(train_client(method, adapters, state, s, seed), s) for s, seed in clients]
    once = aggregate(method, state, uploads)
    shuffler.shuffle(uploads)
    again = aggregate(method, state, uploads)
    assert all(torch.equal(once[key], again[key]) for key in once)


@pytest.mark.parametrize("name", METHODS)
def test_clients_that_change_nothing_change_nothing(name):
    method, adapters = build(name)
    state = random_state(method, 1)
    before = deltas(method, adapters, state)
    uploads = []
    for _ in range(3):
        method.load(adapters, method.broadcast(state, 1.0))
        method.choose(adapters, 1.0, generator(0), lambda: None)
        uploads.append((method.upload(adapters), 1.0))
    after = deltas(method, adapters, aggregate(method, state, uploads))
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", METHODS)
def test_what_travels_arrives_as_it_was(name):
    method, adapters = build(name)
    state = random_state(method, 1)
    upload = train_client(method, adapters, state, 0.5, 3)
    for tensors in (state, upload):
        arrived = from_record(to_record(tensors))
        assert {k: (v.dtype, v.shape) for k, v in arrived.items()} == {
            k: (v.dtype, v.shape) for k, v in tensors.items()
        }
        assert all(torch.equal(arrived[key], tensors[key]) for key in tensors)


@pytest.mark.parametrize("name", METHODS)
def test_lora_factors_are_the_delta_weight(name):
    method, adapters = build(name)
    expected = deltas(method, adapters, random_state(method, 2))
    for adapter, delta in zip(adapters, expected, strict=True):
        B, A = method.lora_factors(adapter)
        torch.testing.assert_close((B @ A).double(), delta, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_the_rank_is_the_largest_within_the_budget(name):
    method, adapters = build(name, rank=None, lora_rank=3)
    trained = sum(p.numel() for p in method.parameters(adapters))
    assert trained == method.trainable_parameters() <= method.budget
    bigger, _ = build(name, rank=method.rank + 1, lora_rank=3)
    assert bigger.trainable_parameters() > method.budget


@given(
    st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5),
    st.sampled_from(["layer", "global"]),
)
def test_ravan_averages_the_delta_weights_of_each_head_over_who_trained_it(clients, selection):
    method, adapters = build(selection=selection)
    state = random_state(method, 1)
    uploads, plain = [], []
    for share, seed in clients:
        upload = train_client(method, adapters, state, share, seed)
        uploads.append((upload, share))
        heads = method.heads_in(upload)
        where = [(layer, head) for layer, row in enumerate(heads) for head in row]
        plain.append((heads, dict(zip(where, upload["H"], strict=True))))
        assert len(where) == affordable(share, 3) * len(LAYERS)
    new = aggregate(method, state, uploads)

    torch.testing.assert_close(new["H"], head_means(state["H"], plain))
    for layer in range(len(LAYERS)):
        for head in range(3):
            deltas_of_head = []
            for heads, sent in plain:
                if head in heads[layer]:
                    delta = multihead_delta(
                        adapters[layer].B[[head]],
                        sent[layer, head][None],
                        adapters[layer].A[[head]],
                        torch.ones(1),
                    )
                    deltas_of_head.append(delta)
            if not deltas_of_head:  # nobody trained it: it stays, to the bit
                assert torch.equal(new["H"][layer, head], state["H"][layer, head])
                continue
            own = multihead_delta(
                adapters[layer].B[[head]],
                new["H"][layer, head][None],
                adapters[layer].A[[head]],
                torch.ones(1),
            )
            mean = torch.stack(deltas_of_head).mean(0)
            torch.testing.assert_close(own, mean, rtol=1e-4, atol=1e-5)


def test_ravan_uploads_the_products_of_scale_and_head():
    method, adapters = build()
    method.load(adapters, random_state(method, 1))
    method.choose(adapters, 1.0, generator(0), lambda: None)
    with torch.no_grad():
        for adapter in adapters:
            adapter.s.copy_(torch.tensor([2.0, -1.0, 0.5]))
    upload = method.upload(adapters)
    expected = torch.cat([adapter.s[:, None, None] * adapter.H for adapter in adapters])
    torch.testing.assert_close(upload["H"], expected.detach())


def test_ravans_scales_start_at_one_in_every_round():
    method, adapters = build()
    state = random_state(method, 1)
    for share in (1.0, 0.5):
        train_client(method, adapters, state, share, 5)
    method.load(adapters, state)
    assert all(torch.equal(adapter.s, torch.ones(3)) for adapter in adapters)
    assert all(torch.equal(a.H, h) for a, h in zip(adapters, state["H"], strict=True))


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_constant_scales_are_not_trained(share):
    method, adapters = build(scaling="constant")
    method.load(adapters, method.initial_state())
    method.choose(adapters, share, generator(0), lambda: None)
    heads = affordable(share, 3)
    shapes = [tuple(p.shape) for p in method.parameters(adapters)]
    assert shapes == [(heads, 2, 2)] * len(LAYERS)
    assert method.trainable_parameters() == 2 * 3 * 4


def test_only_the_chosen_heads_are_given_to_the_optimiser():
    method, adapters = build()
    method.load(adapters, method.initial_state())
    method.choose(adapters, 0.4, generator(0), lambda: None)
    assert sum(p.numel() for p in method.parameters(adapters)) == len(LAYERS) * (4 + 1)


def test_a_budget_too_small_for_the_heads_says_so():
    with pytest.raises(ValueError, match=r"heads = 100: the budget of .* lower heads or set rank"):
        build(rank=None, heads=100, lora_rank=1)


def test_ravans_budgets_are_those_of_the_paper():
    """ViT-B/16: 24 matrices of 768 x 768; ranks 110, and 156 for twice the budget."""
    layers = [Layer(str(i), 768, 768) for i in range(24)]
    for lora_rank, rank, parameters in ((32, 110, 1_161_696), (64, 156, 2_336_352)):
        settings = dataclasses.replace(SETTINGS, rank=None, heads=4, lora_rank=lora_rank)
        method = Ravan(settings, layers)
        assert (method.rank, method.trainable_parameters()) == (rank, parameters)


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_are_packed_and_unpacked(bits):
    packed = _pack_bits(torch.tensor(bits))
    assert len(packed) == -(-len(bits) // 8)
    assert _unpack_bits(packed)[: len(bits)].tolist() == bits


def test_fingerprints_tell_bases_apart_and_ignore_what_is_trained():
    method, adapters = build()
    before = method.fingerprint(adapters)
    train_client(method, adapters, random_state(method, 1), 0.5, 1)
    method.load(adapters, method.initial_state())
    assert method.fingerprint(adapters) == before
    for change in ({"seed": 1}, {"init": "gram-schmidt"}, {"rank": 1}):
        assert build(**change)[0].fingerprint(build(**change)[1]) != pytest.approx(before, rel=1e-3)


def _damage(**changes):
    def apply(upload):
        return {k: v for k, v in {**upload, **changes}.items() if v is not None}

    return apply


H = torch.zeros(4, 2, 2)
BEYOND = torch.tensor([0b11011011], dtype=torch.uint8)
BAD_UPLOADS = {
    "a tensor is missing": (_damage(heads=None), r"upload has \['H'\], expected"),
    "a tensor too many": (_damage(x=torch.zeros(1)), "upload has .*'x'"),
    "another shape": (_damage(H=torch.zeros(4, 2, 3)), r"H is torch.float32 \(4, 2, 3\), exp"),
    "a head too few": (_damage(H=torch.zeros(3, 2, 2)), r"expected torch.float32 \(4, 2, 2\)"),
    "broadcastable": (_damage(H=torch.zeros(1, 2, 2)), r"expected torch.float32 \(4, 2, 2\)"),
    "another dtype": (_damage(H=H.double()), "H is torch.float64"),
    "not a number": (_damage(H=H + torch.nan), "H has values that are not finite"),
    "infinite": (_damage(H=H + torch.inf), "H has values that are not finite"),
    "too many heads": (_damage(heads=_pack_bits(torch.ones(6))), r"marks \[3, 3\] heads"),
    "uneven heads": (
        _damage(heads=_pack_bits(torch.tensor([1, 1, 1, 1, 0, 0]))),
        r"marks \[3, 1\] heads by layer, expected 2 in each",
    ),
    "a head beyond the last": (_damage(heads=BEYOND), "heads marks a head beyond the last of 6"),
    "other bits": (_damage(heads=torch.zeros(1, dtype=torch.int32)), "heads is torch.int32"),
    "huge": (_damage(H=H + 1e30), r"upload has norm 4e\+30, expected at most 1e\+09"),
}


@pytest.mark.parametrize("case", BAD_UPLOADS)
def test_a_bad_upload_is_rejected_and_leaves_the_sums_alone(case):
    damage, message = BAD_UPLOADS[case]
    method, adapters = build()
    state = random_state(method, 1)
    good = train_client(method, adapters, state, 0.7, 1)
    pot = Aggregate(method, state, max_norm=1e9)
    with pytest.raises(ValueError, match=message):
        pot.offer(damage(good), 0.7)
    pot.offer(good, 0.7)
    expected = aggregate(method, state, [(good, 0.7)])
    assert pot.count == 1
    assert torch.equal(pot.close()["H"], expected["H"])


def test_a_client_may_not_send_more_than_its_share():
    method, adapters = build()
    state = random_state(method, 1)
    upload = train_client(method, adapters, state, 1.0, 1)
    with pytest.raises(ValueError, match=r"marks \[3, 3\] heads by layer, expected 1 in each"):
        Aggregate(method, state, 1e9).offer(upload, 0.5)


def test_the_classifier_is_averaged_plainly_over_all_clients():
    method, adapters = build()
    state = method.initial_state() | {CLASSIFIER: torch.zeros(3)}
    pot = Aggregate(method, state, 1e9)
    for value, share in ((1.0, 1.0), (2.0, 0.4), (6.0, 0.4)):
        upload = train_client(method, adapters, method.initial_state(), share, int(value))
        pot.offer(upload | {CLASSIFIER: torch.full((3,), value)}, share)
    assert pot.close()[CLASSIFIER].tolist() == [3.0, 3.0, 3.0]


def test_a_classifier_that_is_frozen_may_not_be_sent():
    method, adapters = build()
    upload = train_client(method, adapters, method.initial_state(), 1.0, 1)
    with pytest.raises(ValueError, match=r"upload has \['H', 'classifier', 'heads'\], expected"):
        Aggregate(method, method.initial_state(), 1e9).offer(
            upload | {CLASSIFIER: torch.zeros(3)}, 1.0
        )


def test_an_unknown_method_lists_the_methods():
    with pytest.raises(ValueError, match="method 'ravn' is unknown; expected one of ravan"):
        get_method("ravn")


def test_heads_that_do_not_fit_are_told_once(caplog):
    with caplog.at_level("INFO"):
        build(init="gram-schmidt", heads=4)  # 8 directions in matrices of 4 to 7 sides
    told = [record.getMessage() for record in caplog.records]
    assert told == [
        "gram-schmidt: 4 heads of rank 2 are more than 4 dimensions hold; bases are orthonormal "
        "in blocks of as many heads as fit"
    ]
