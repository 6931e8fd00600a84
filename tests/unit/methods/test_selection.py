"""Selection of heads: budget fractions, scores, ties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import MultiHeadLinear, make_bases
from ravan_flwr.config.keys import KEYS
from ravan_flwr.methods.budgets import BUDGET_FRACTIONS, BUDGETS, affordable, budget_fraction
from ravan_flwr.methods.multihead import SCORINGS, best_heads, score_heads
from ravan_flwr.seeding import generator


class Tower(nn.Module):
    """Two adapted layers with a nonlinearity between them, in float64."""

    def __init__(self):
        super().__init__()
        torch.default_generator.manual_seed(0)
        self.layers = nn.ModuleList()
        for name, (out_features, in_features) in {"first": (6, 5), "second": (4, 6)}.items():
            B, A = make_bases(
                "normal", heads=3, rank=2, out_features=out_features, in_features=in_features,
                seed=0, layer=name,
            )  # fmt: skip
            base = nn.Linear(in_features, out_features, dtype=torch.float64).requires_grad_(False)
            layer = MultiHeadLinear(base, B.double(), A.double())
            nn.init.normal_(layer.H)
            self.layers.append(layer)

    def forward(self, x):
        return self.layers[1](torch.tanh(self.layers[0](x)))


@pytest.fixture
def tower():
    return Tower()


def test_the_configuration_offers_every_scoring():
    assert set(KEYS["scoring"].choices) == set(SCORINGS)


@pytest.mark.parametrize("parts", [1, 3])
def test_gradient_scores_are_the_norms_of_the_gradients_of_the_products(tower, parts):
    """The scores are of the whole batch, in any number of parts."""
    x = torch.randn(7, 5, dtype=torch.float64)

    def backward(*_):
        for part in x.tensor_split(parts):
            (tower(part).square().sum() / tower(x).numel()).backward()

    tower(x).square().mean().backward()
    expected = torch.stack([layer.H.grad.norm(dim=(1, 2)) for layer in tower.layers])
    tower.zero_grad(set_to_none=True)
    scores = score_heads("gradient", list(tower.layers), generator(0), backward)
    torch.testing.assert_close(scores, expected.float(), check_dtype=False, rtol=1e-5, atol=1e-6)
    assert all(layer.subset is None and layer.H.grad is None for layer in tower.layers)


def test_weight_scores_are_the_norms_of_the_products_relative_to_the_weight(tower):
    with torch.no_grad():
        tower.layers[0].s.copy_(torch.tensor([1.0, -3.0, 0.5]))
    scores = score_heads("weight", list(tower.layers), generator(0), lambda: None)
    for layer, row in zip(tower.layers, scores, strict=True):
        for head in range(3):
            norm = (layer.s[head] * layer.H[head]).norm() / layer.base.weight.norm()
            torch.testing.assert_close(row[head], norm.detach())


def test_random_scores_are_a_function_of_the_generator(tower):
    layers = list(tower.layers)
    one, two, other = (
        score_heads("random", layers, generator(seed), lambda: None) for seed in (1, 1, 2)
    )
    assert torch.equal(one, two)
    assert not torch.equal(one, other)


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_local_selection_takes_the_best_heads_of_each_layer(layers, heads, data):
    number = data.draw(st.integers(1, heads))
    scores = torch.rand(layers, heads, generator=generator(layers, heads))
    chosen = best_heads(scores, number, "layer", generator(0))
    for row, picked in zip(scores, chosen, strict=True):
        assert picked == sorted(picked)
        assert len(picked) == number
        rest = [head for head in range(heads) if head not in picked]
        assert not rest or row[picked].min() >= row[rest].max()


def test_global_selection_takes_the_same_number_over_all_layers():
    scores = torch.tensor([[9.0, 8.0, 7.0], [1.0, 6.0, 0.0]])
    assert best_heads(scores, 2, "global", generator(0)) == [[0, 1, 2], [1]]
    assert best_heads(scores, 2, "layer", generator(0)) == [[0, 1], [0, 1]]


@pytest.mark.parametrize("selection", ["layer", "global"])
def test_ties_are_broken_by_a_seeded_draw(selection):
    zeros = torch.zeros(3, 4)
    picks = [best_heads(zeros, 2, selection, generator(seed)) for seed in range(60)]
    assert picks == [best_heads(zeros, 2, selection, generator(seed)) for seed in range(60)]
    counts = torch.zeros(3, 4)
    for pick in picks:
        for layer, heads in enumerate(pick):
            counts[layer, heads] += 1
    # 30 expected each, with a standard deviation below 4.
    assert counts.min() > 12
    assert counts.max() < 48


@pytest.mark.parametrize("distribution", BUDGETS)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_budget_fractions_are_distributed_as_documented(distribution, seed):
    fractions = [budget_fraction(distribution, seed, client) for client in range(200)]
    assert sum(BUDGETS[distribution]) == pytest.approx(1)
    for fraction, part in zip(BUDGET_FRACTIONS, BUDGETS[distribution], strict=True):
        assert fractions.count(fraction) == pytest.approx(200 * part, abs=3)
    assert fractions == [budget_fraction(distribution, seed, client) for client in range(200)]


def test_budget_fractions_differ_between_seeds():
    one, two = ([budget_fraction("uniform", s, c) for c in range(20)] for s in (0, 1))
    assert one != two


@given(st.sampled_from(BUDGET_FRACTIONS), st.integers(1, 64))
def test_a_budget_fraction_affords_the_rounded_down_heads_and_at_least_one(fraction, heads):
    assert affordable(fraction, heads) == max(1, int(fraction * 4) * heads // 4)


def test_a_product_just_below_an_integer_is_rounded_to_it():
    assert 0.29 * 100 < 29
    assert affordable(0.29, 100) == 29
