"""RAVAN's own properties: equation 8 head by head, products, budgets, bits."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.adapters import Layer
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.ravan import Ravan
from ravan_flwr.methods.tensors import pack_bits, unpack_bits
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import Aggregate
from ravan_flwr.server.update_norm_check import UpdateNormCheck
from tests.methods import (
    LAYERS,
    SETTINGS,
    aggregate,
    build,
    build_mid_run,
    some_state,
    train_client,
)
from tests.reference import head_means

SHARES = st.sampled_from([0.25, 0.5, 0.75, 1.0])
CLIENTS = st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5)


@given(CLIENTS, st.sampled_from(["layer", "global"]))
def test_ravan_averages_each_head_over_its_trainers(clients, selection):
    method, adapters, state = build_mid_run(selection=selection)
    uploads, plain = [], []
    for fraction, seed in clients:
        upload = train_client(method, adapters, state, fraction, seed)
        uploads.append((upload, fraction))
        heads = method.heads_in(upload)
        where = [(layer, head) for layer, row in enumerate(heads) for head in row]
        plain.append((heads, dict(zip(where, upload["H"], strict=True))))
        assert len(where) == affordable(fraction, 3) * len(LAYERS)
    new = aggregate(method, state, uploads)

    torch.testing.assert_close(new["H"], head_means(state["H"], plain))
    for layer in range(len(LAYERS)):
        for head in range(3):  # trained by no client: unchanged, to the bit
            trained = any(head in heads[layer] for heads, _ in plain)
            assert trained or torch.equal(new["H"][layer, head], state["H"][layer, head])


@given(CLIENTS, st.sampled_from(["layer", "global"]))
def test_over_all_the_aggregate_is_the_mean_of_the_clients_models(clients, selection):
    """Also with mixed budgets: a client that did not train a head keeps the broadcast one."""
    method, adapters, state = build_mid_run(selection=selection, head_mean="all")
    uploads, models = [], []
    for fraction, seed in clients:
        upload = train_client(method, adapters, state, fraction, seed)
        uploads.append((upload, fraction))
        H, at = state["H"].double().clone(), 0
        for layer, row in enumerate(method.heads_in(upload)):
            for head in row:
                H[layer, head] = upload["H"][at]
                at += 1
        models.append(H)
    new = aggregate(method, state, uploads)["H"]
    assert new.dtype == torch.float32
    torch.testing.assert_close(new.double(), sum(models) / len(models), rtol=1e-6, atol=1e-6)


def test_with_full_budgets_both_head_means_are_equal_to_the_bit():
    found = []
    for head_mean in ("trained", "all"):
        method, adapters, state = build_mid_run(head_mean=head_mean)
        uploads = [(train_client(method, adapters, state, 1.0, seed), 1.0) for seed in range(3)]
        found.append(aggregate(method, state, uploads)["H"])
    assert torch.equal(*found)


def test_ravan_uploads_the_products_of_scale_and_head():
    method, adapters = build()
    method.load(adapters, some_state(method, adapters))
    method.choose(adapters, 1.0, generator(0), lambda: None)
    with torch.no_grad():
        for adapter in adapters:
            adapter.s.copy_(torch.tensor([2.0, -1.0, 0.5]))
    upload = method.upload(adapters)
    expected = torch.cat([adapter.s[:, None, None] * adapter.H for adapter in adapters])
    torch.testing.assert_close(upload["H"], expected.detach())


def test_ravans_scales_start_at_one_in_every_round():
    method, adapters, state = build_mid_run()
    for fraction in (1.0, 0.5):
        train_client(method, adapters, state, fraction, 5)
    method.load(adapters, state)
    assert all(torch.equal(adapter.s, torch.ones(3)) for adapter in adapters)
    assert all(torch.equal(a.H, h) for a, h in zip(adapters, state["H"], strict=True))


@pytest.mark.parametrize("fraction", [0.4, 0.5, 1.0])
@pytest.mark.parametrize("scaling", ["constant", "trained"])
def test_only_the_chosen_heads_are_trained_and_constant_scales_are_not(scaling, fraction):
    method, adapters = build(scaling=scaling)
    method.load(adapters, method.initial_state(adapters))
    method.choose(adapters, fraction, generator(0), lambda: None)
    heads = affordable(fraction, 3)
    of_layer = [(heads, 2, 2)] + [(heads,)] * (scaling == "trained")
    assert [tuple(p.shape) for p in method.parameters(adapters)] == len(LAYERS) * of_layer
    assert method.trainable_parameters() == 2 * 3 * (4 + (scaling == "trained"))


def test_ravans_ranks_and_budgets_equal_the_papers():
    """ViT-B/16: 24 matrices of 768 x 768; ranks 110, and 156 for twice the budget."""
    layers = [Layer(str(i), 768, 768) for i in range(24)]
    for lora_rank, rank, parameters in ((32, 110, 1_161_696), (64, 156, 2_336_352)):
        settings = dataclasses.replace(SETTINGS, rank=None, heads=4, lora_rank=lora_rank)
        method = Ravan(settings, layers, 0)
        assert (method.rank, method.trainable_parameters()) == (rank, parameters)


def test_the_bits_of_heads_have_a_fixed_order():
    """The first (layer, head) is the lowest bit of the first byte; padding is zero."""
    chosen = torch.tensor([True, False, False, False, False, False, False, True, False, True, True])
    assert pack_bits(chosen).tolist() == [0b10000001, 0b00000110]
    assert pack_bits(chosen).dtype == torch.uint8
    assert unpack_bits(torch.tensor([0b10000001, 0b00000110], dtype=torch.uint8), 11).tolist() == (
        chosen.tolist()
    )
    method, adapters = build(heads=5)
    method.load(adapters, method.initial_state(adapters))
    for adapter, heads in zip(adapters, ([0, 2], [1, 4]), strict=True):
        adapter.train_heads(heads)
    assert method.upload(adapters)["heads"].tolist() == [0b01000101, 0b00000010]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_bits_round_trip(bits):
    packed = pack_bits(torch.tensor(bits))
    assert len(packed) == -(-len(bits) // 8)
    assert unpack_bits(packed)[: len(bits)].tolist() == bits


@pytest.mark.parametrize("change", [{"seed": 1}, {"init": "gram-schmidt"}, {"rank": 1}], ids=str)
def test_fingerprints_depend_on_the_bases(change):
    before, after = (m.fingerprint(adapters) for m, adapters in (build(), build(**change)))
    assert after != pytest.approx(before, rel=1e-3)


def _damage(**changes):
    def apply(upload):
        return {k: v for k, v in {**upload, **changes}.items() if v is not None}

    return apply


H = torch.zeros(4, 2, 2)
BEYOND = torch.tensor([0b11011011], dtype=torch.uint8)
# Shapes, dtypes and values of H: test_methods.py.
BAD_UPLOADS = {
    "a tensor is missing": (_damage(heads=None), r"got tensors \['H'\], expected"),
    "another shape": (_damage(H=torch.zeros(4, 2, 3)), r"H is torch.float32 \(4, 2, 3\), exp"),
    "a head too few": (_damage(H=torch.zeros(3, 2, 2)), r"expected torch.float32 \(4, 2, 2\)"),
    "too many heads": (_damage(heads=pack_bits(torch.ones(6))), r"marks \[3, 3\] heads"),
    "uneven heads": (
        _damage(heads=pack_bits(torch.tensor([1, 1, 1, 1, 0, 0]))),
        r"marks \[3, 1\] heads by layer, expected 2 in each",
    ),
    "a head beyond the last": (_damage(heads=BEYOND), "heads marks a head beyond the last of 6"),
    "other bits": (_damage(heads=torch.zeros(1, dtype=torch.int32)), "heads is torch.int32"),
    "huge": (_damage(H=H + 1e30), r"upload has a change of norm 4e\+30, expected at most 1e\+09"),
}


@pytest.mark.parametrize("case", BAD_UPLOADS)
def test_an_invalid_upload_is_rejected_and_leaves_the_sums_unchanged(case):
    damage, message = BAD_UPLOADS[case]
    method, adapters, state = build_mid_run()
    good = train_client(method, adapters, state, 0.7, 1)
    sums = Aggregate(method, state, UpdateNormCheck(1e9))
    with pytest.raises(ValueError, match=message):
        sums.check_and_add(damage(good), 0.7)
    sums.check_and_add(good, 0.7)
    expected = aggregate(method, state, [(good, 0.7)])
    assert sums.count == 1
    assert torch.equal(sums.close()["H"], expected["H"])


@pytest.mark.parametrize(
    ("selection", "message"),
    [
        ("layer", r"heads marks \[3, 3\] heads by layer, expected 1 in each"),
        ("global", "heads marks 6 heads, expected 2$"),
    ],
)
def test_a_client_may_not_send_more_than_its_budget_fraction(selection, message):
    method, adapters, state = build_mid_run(selection=selection)
    upload = train_client(method, adapters, state, 1.0, 1)
    with pytest.raises(ValueError, match=message):
        Aggregate(method, state, UpdateNormCheck(1e9)).check_and_add(upload, 0.5)
