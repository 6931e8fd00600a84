"""Properties of the adapted layer, against plain loops in float64."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ravan_flwr.adapters import MultiHeadLinear, attach, find_layers, make_bases
from ravan_flwr.adapters.merged import factored_cost, merged_cost
from ravan_flwr.adapters.multihead import merges
from tests.reference import multihead_delta, multihead_forward

SHAPES = st.tuples(
    st.integers(1, 4),  # heads
    st.integers(1, 3),  # rank
    st.integers(3, 9),  # out
    st.integers(3, 9),  # in
    st.booleans(),  # bias
)


def trainable(layer):
    return [p for p in layer.parameters() if p.requires_grad]


def make_layer(heads, rank, out_features, in_features, bias, seed=0):
    torch.default_generator.manual_seed(seed)
    base = nn.Linear(in_features, out_features, bias=bias, dtype=torch.float64)
    B, A = make_bases(
        "normal", heads=heads, rank=rank, out_features=out_features, in_features=in_features,
        seed=seed, layer="layer",
    )  # fmt: skip
    layer = MultiHeadLinear(base, B.double(), A.double())
    with torch.no_grad():
        layer.H.copy_(torch.randn_like(layer.H))
        layer.s.copy_(torch.randn_like(layer.s))
    return layer


def loop_over_heads(layer, x):
    return multihead_forward(
        x, layer.base.weight, layer.base.bias, layer.B, layer.H, layer.A, layer.s
    )


FORMS = st.sampled_from(["auto", "merged", "factored"])


@given(SHAPES, FORMS, st.lists(st.integers(1, 3), max_size=3))
def test_forward_is_the_loop_over_heads(shape, form, batch):
    layer = make_layer(*shape)
    layer.form = form
    x = torch.randn(*batch, layer.base.in_features, dtype=torch.float64)
    torch.testing.assert_close(layer(x), loop_over_heads(layer, x))
    delta = multihead_delta(layer.B, layer.H, layer.A, layer.s)
    torch.testing.assert_close(layer.delta_weight(), delta)


WAYS = st.sampled_from(["tokens", "factors", "dense"])


@given(SHAPES, FORMS, WAYS, st.data())
def test_gradients_equal_those_of_the_loop_for_any_heads(shape, form, way, data):
    layer = make_layer(*shape)
    layer.form = form
    heads = sorted(data.draw(st.sets(st.integers(0, shape[0] - 1))))
    x = torch.randn(4, layer.base.in_features, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, layer.base.out_features, dtype=torch.float64)

    slow = (loop_over_heads(layer, x) - target).square().sum()
    x_grad, H_grad, s_grad = torch.autograd.grad(slow, [x, layer.H, layer.s])

    layer.train_heads(heads)
    fast = (layer(x) - target).square().sum()
    torch.testing.assert_close(fast, slow)
    parameters = trainable(layer)
    assert [tuple(p.shape) for p in parameters] == [(len(heads), *layer.H.shape[1:]), (len(heads),)]
    with mock.patch("ravan_flwr.adapters.merged.cheapest_way", return_value=way):
        got = torch.autograd.grad(fast, [x, *parameters], allow_unused=not heads)
    torch.testing.assert_close(got[0], x_grad)
    if heads:
        torch.testing.assert_close(got[1], H_grad[heads])
        torch.testing.assert_close(got[2], s_grad[heads])


def test_the_first_layers_input_gets_no_gradient():
    layer = make_layer(2, 2, 6, 5, True)
    for layer.form in ("merged", "factored"):
        x = torch.randn(4, 5, dtype=torch.float64)
        with FlopCounterMode(display=False) as first:
            layer(x).sum().backward()
        with FlopCounterMode(display=False) as later:
            layer(x.requires_grad_()).sum().backward()
        assert first.get_total_flops() < later.get_total_flops()


COSTS = st.tuples(
    st.integers(1, 4096), st.integers(1, 1024), st.integers(1, 1024), st.integers(1, 8),
    st.integers(1, 64),
)  # fmt: skip


def merging(layer, x):
    return merges(x, layer.base.weight, layer.base.bias, layer._heads(), layer.form)


def cost_layer(shape):
    """Make a float32 layer on the meta device whose input needs a gradient."""
    tokens, out, in_, heads, rank = shape
    with torch.device("meta"):
        layer = MultiHeadLinear(
            nn.Linear(in_, out), torch.empty(heads, out, rank), torch.empty(heads, rank, in_)
        )
        return layer, torch.empty(tokens, in_, requires_grad=True)


@given(COSTS, st.data())
def test_the_cost_model_counts_the_actual_multiplications(shape, data):
    """Multiplications beyond those of the frozen layer equal PyTorch's count, for both forms."""
    tokens, out, in_, heads, rank = shape
    trained = data.draw(st.integers(1, heads))
    layer, x = cost_layer(shape)
    if trained < heads:
        layer.train_heads(range(trained))
    cost = {
        name: count(tokens, out, in_, heads, trained, rank)
        for name, count in {"merged": merged_cost, "factored": factored_cost}.items()
    }
    for layer.form in ("merged", "factored"):
        with FlopCounterMode(display=False) as counter:
            layer(x).sum().backward()
        backbone = 2 * tokens * out * in_
        assert counter.get_total_flops() // 2 - backbone == cost[layer.form]
    layer.form = "auto"
    assert merging(layer, x) == (cost["merged"] < cost["factored"])


def test_low_precision_uses_the_factored_form_and_keeps_small_updates():
    base = nn.Linear(64, 64)
    nn.init.constant_(base.weight, 1.0)
    B, A = make_bases("normal", heads=2, rank=8, out_features=64, in_features=64, seed=0, layer="l")
    layer = MultiHeadLinear(base, B, A)
    nn.init.normal_(layer.H, std=1e-6)
    x = torch.randn(4096, 64)
    expected = (x.double() @ layer.delta_weight().double().T).detach()

    def error(low):
        with torch.no_grad():
            return float((low.double() - expected).norm() / expected.norm())

    with torch.autocast("cpu", torch.bfloat16):
        assert not merging(layer, x)
        layer.base.weight.zero_()  # only the update is left
        layer.base.bias.zero_()
        assert error(layer(x)) < 0.02
    nn.init.constant_(base.weight, 1.0)
    merged = (base.weight + layer.delta_weight()).bfloat16().float() - base.weight
    assert error(x @ merged.T) > 0.9
    assert merging(layer, x)  # in float32
    layer.bfloat16()
    assert not merging(layer, x.bfloat16())


def test_a_frozen_head_has_no_gradient_and_no_parameter():
    layer = make_layer(3, 2, 6, 5, True)
    layer.train_heads([1])
    layer(torch.randn(4, 5, dtype=torch.float64)).sum().backward()
    assert layer.H.grad is None
    assert layer.s.grad is None
    assert sum(p.numel() for p in trainable(layer)) == 2 * 2 + 1
    assert layer.trained_heads() == [1]
    torch.testing.assert_close(layer.products(), layer.s[1] * layer.H[[1]])


def test_training_all_heads_again_restores_the_values():
    layer = make_layer(3, 2, 6, 5, True)
    before = layer.H.detach().clone()
    layer.train_heads([0, 2])
    with torch.no_grad():
        for parameter in trainable(layer):
            parameter.zero_()
    layer.train_all_heads()
    assert torch.equal(layer.H, before)
    assert layer.H.requires_grad


@pytest.mark.parametrize("bias", [True, False])
def test_a_new_layer_equals_its_base(bias):
    base = nn.Linear(7, 4, bias=bias)
    x = torch.randn(3, 7)
    expected = base(x)
    B, A = make_bases(
        "gram-schmidt", heads=2, rank=2, out_features=4, in_features=7, seed=0, layer="l"
    )
    assert torch.equal(MultiHeadLinear(base, B, A)(x), expected)


def test_only_H_and_s_are_trained():
    layer = make_layer(2, 2, 4, 4, True)
    assert {n for n, p in layer.named_parameters() if p.requires_grad} == {"H", "s"}
    assert set(layer.state_dict()) == {"H", "s", "base.weight", "base.bias"}


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 2)}) for _ in range(2)
        )
        self.my_q_proj = nn.Linear(4, 4)


def test_layers_are_found_by_the_suffixes_of_their_names():
    found = find_layers(Network(), ["q_proj", "v_proj"])
    assert [(f.name, f.out_features, f.in_features) for f in found] == [
        ("blocks.0.q_proj", 4, 4),
        ("blocks.0.v_proj", 2, 4),
        ("blocks.1.q_proj", 4, 4),
        ("blocks.1.v_proj", 2, 4),
    ]


def test_layers_that_are_trained_themselves_get_no_adapter():
    network = Network()
    trained = network.get_submodule("blocks.0.q_proj").parameters()
    found = find_layers(network, ["q_proj", "my_q_proj"], trained)
    assert [layer.name for layer in found] == ["blocks.1.q_proj", "my_q_proj"]


def test_nothing_to_adapt_lists_the_linear_layers():
    with pytest.raises(ValueError, match=r"got targets \['query'\].*blocks.0.q_proj.*my_q_proj"):
        find_layers(Network(), ["query"])


def test_attached_adapters_replace_the_layers():
    network = Network()
    layers = find_layers(network, ["v_proj"])
    adapters = attach(network, layers, lambda _, linear: nn.Sequential(linear))
    assert list(adapters) == ["blocks.0.v_proj", "blocks.1.v_proj"]
    assert network.get_submodule("blocks.1.v_proj") is adapters["blocks.1.v_proj"]
