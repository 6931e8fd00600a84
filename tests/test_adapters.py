"""The laws of the adapted layer, against plain loops in float64."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import MultiHeadLinear, attach, find_layers, make_bases
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
    torch.manual_seed(seed)
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


def oracle(layer, x):
    return multihead_forward(
        x, layer.base.weight, layer.base.bias, layer.B, layer.H, layer.A, layer.s
    )


@given(SHAPES, st.lists(st.integers(1, 3), min_size=1, max_size=3))
def test_forward_is_the_loop_over_heads(shape, batch):
    layer = make_layer(*shape)
    x = torch.randn(*batch, layer.base.in_features, dtype=torch.float64)
    torch.testing.assert_close(layer(x), oracle(layer, x))


@given(SHAPES)
def test_forward_is_base_plus_delta_weight(shape):
    layer = make_layer(*shape)
    x = torch.randn(5, layer.base.in_features, dtype=torch.float64)
    torch.testing.assert_close(layer(x), layer.base(x) + x @ layer.delta_weight().T)
    expected = multihead_delta(layer.B, layer.H, layer.A, layer.s)
    torch.testing.assert_close(layer.delta_weight(), expected)


@given(SHAPES, st.data())
def test_gradients_are_those_of_the_loop_for_any_heads(shape, data):
    layer = make_layer(*shape)
    heads = sorted(data.draw(st.sets(st.integers(0, shape[0] - 1))))
    x = torch.randn(4, layer.base.in_features, dtype=torch.float64, requires_grad=True)
    target = torch.randn(4, layer.base.out_features, dtype=torch.float64)

    slow = (oracle(layer, x) - target).square().sum()
    x_grad, H_grad, s_grad = torch.autograd.grad(slow, [x, layer.H, layer.s])

    layer.train_heads(heads)
    fast = (layer(x) - target).square().sum()
    torch.testing.assert_close(fast, slow)
    parameters = trainable(layer)
    assert [tuple(p.shape) for p in parameters] == [
        (len(heads), *layer.H.shape[1:]),
        (len(heads),),
    ]
    got = torch.autograd.grad(fast, [x, *parameters], allow_unused=not heads)
    torch.testing.assert_close(got[0], x_grad)
    if heads:
        torch.testing.assert_close(got[1], H_grad[heads])
        torch.testing.assert_close(got[2], s_grad[heads])


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
def test_a_new_layer_computes_what_its_base_does(bias):
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


def test_bases_of_another_shape_are_refused():
    B, A = torch.zeros(2, 5, 3), torch.zeros(2, 3, 7)
    with pytest.raises(ValueError, match=r"got B \(2, 5, 3\) and A \(2, 3, 7\), expected B"):
        MultiHeadLinear(nn.Linear(7, 4), B, A)


def test_autocast_gives_the_same_to_its_precision():
    layer = make_layer(3, 2, 8, 8, True).float()
    x = torch.randn(5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        low = layer(x)
    torch.testing.assert_close(low.float(), layer(x), rtol=0.05, atol=0.05)


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"q_proj": nn.Linear(4, 4), "v_proj": nn.Linear(4, 2)}) for _ in range(2)
        )
        self.my_q_proj = nn.Linear(4, 4)


def test_layers_are_found_by_the_ends_of_their_names():
    found = find_layers(Network(), ["q_proj", "v_proj"])
    assert [(f.name, f.out_features, f.in_features) for f in found] == [
        ("blocks.0.q_proj", 4, 4),
        ("blocks.0.v_proj", 2, 4),
        ("blocks.1.q_proj", 4, 4),
        ("blocks.1.v_proj", 2, 4),
    ]


def test_nothing_to_adapt_lists_the_linear_layers():
    with pytest.raises(ValueError, match=r"got targets \['query'\].*blocks.0.q_proj.*my_q_proj"):
        find_layers(Network(), ["query"])


def test_attached_adapters_take_the_layers_places():
    network = Network()
    layers = find_layers(network, ["v_proj"])
    adapters = attach(network, layers, lambda _, linear: nn.Sequential(linear))
    assert list(adapters) == ["blocks.0.v_proj", "blocks.1.v_proj"]
    assert network.get_submodule("blocks.1.v_proj") is adapters["blocks.1.v_proj"]
