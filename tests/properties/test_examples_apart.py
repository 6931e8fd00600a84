"""Per-example gradients equal those of a loop over examples, in every layer and every form.

The oracle computes the gradient of each example's loss, one after the other, in float64, by
autograd. Opacus is a second oracle.
"""

import copy

import opacus
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ravan_flwr.extras.example_privacy.gradients import (
    ClippedExamples,
    ExampleGradients,
    StepNoise,
    check_independent,
    check_trained,
    joint_norms,
)
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import generator
from tests.methods import assert_close, build_with_network, some_state

BY_EXAMPLE = [name for name, method in METHODS.items() if method.by_example]
# Their layers are the same, though their rounds are not private.
OF_SUCH_LAYERS = [*BY_EXAMPLE, "fed-sb", "fedsa-lora", "local"]
EXAMPLES, TOKENS = 5, 4
TIGHT = {"rtol": 1e-4, "atol": 1e-6}


class BothLayers(nn.Module):
    """Send tokens through both adapted layers, one after the other, and classify their mean."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        q = torch.tanh(self.network.q(x))
        v = self.network.v(torch.cat([q, q[..., :1]], -1))
        return self.head(torch.tanh(v).mean(1))


def adapted(name, fraction=1.0, **changes):
    """Return a model in the middle of a run, a client's trained parameters, and its examples."""
    method, adapters, network = build_with_network(name, **changes)
    torch.default_generator.manual_seed(3)
    model = BothLayers(network)
    state = some_state(method, adapters)
    fraction = fraction if method.can_train(fraction) else 1.0
    method.load(adapters, method.broadcast(state, fraction))
    method.choose(adapters, fraction, generator(1, "choose"), lambda: None)
    parameters = [*method.parameters(adapters), *model.head.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape))
    x = torch.randn(EXAMPLES, TOKENS, 5)
    y = torch.tensor([0, 1, 2, 0, 1])
    return model, parameters, x, y


def gradients_by_loop(model, parameters, x, y):
    """Return the gradients of each example's loss, one after the other, in float64."""
    exact = copy.deepcopy(model).double()
    names = {id(p): name for name, p in model.named_parameters()}
    own = dict(exact.named_parameters())
    parameters_ = [own[names[id(p)]] for p in parameters]
    each = []
    for one in range(len(x)):
        loss = F.cross_entropy(exact(x[one : one + 1].double()), y[one : one + 1])
        pairs = zip(
            parameters_, torch.autograd.grad(loss, parameters_, allow_unused=True), strict=True
        )
        each.append([torch.zeros_like(p) if g is None else g for p, g in pairs])
    return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def gradients_by_example(model, parameters, x, y):
    sizes = torch.ones(len(x))
    return ExampleGradients(model, parameters).of(lambda: F.cross_entropy(model(x), y), sizes)


@pytest.mark.parametrize("form", ["merged", "factored"])
@pytest.mark.parametrize("fraction", [1.0, 0.4])
@pytest.mark.parametrize("name", OF_SUCH_LAYERS)
def test_per_example_gradients_equal_those_of_the_loop(name, fraction, form):
    model, parameters, x, y = adapted(name, fraction, layer_form=form)
    expected = gradients_by_loop(model, parameters, x, y)
    assert_close(gradients_by_example(model, parameters, x, y), expected, **TIGHT)
    assert all(p.requires_grad and p.grad is None for p in parameters)
    assert all(gradients.flatten(1).any(1).all() for gradients in expected if gradients.any())
    assert any(gradients.any() for gradients in expected)


@pytest.mark.parametrize("changes", [{"scaling": "constant"}, {"lora_scale": 0.3}], ids=str)
@pytest.mark.parametrize("name", ["ravan", "fedit"])
def test_per_example_gradients_equal_the_loops_with_other_scales(name, changes):
    model, parameters, x, y = adapted(name, **changes)
    expected = gradients_by_loop(model, parameters, x, y)
    assert_close(gradients_by_example(model, parameters, x, y), expected, **TIGHT)


def test_an_examples_gradient_is_that_of_the_mean_over_its_own_items():
    """The loss is a mean over the items of all examples: three of one, none, and one."""
    torch.manual_seed(0)
    network = nn.Linear(3, 2)
    x, y = torch.randn(3, 4, 3), torch.randint(2, (3, 4))
    sizes = torch.tensor([3, 0, 1])
    counts = torch.arange(4) < sizes[:, None]  # (examples, tokens)
    parameters = list(network.parameters())
    found = ExampleGradients(network, parameters).of(
        lambda: F.cross_entropy(network(x)[counts], y[counts]), sizes
    )
    for one, size in enumerate([3, 0, 1]):
        own = F.cross_entropy(network(x[one, :size]), y[one, :size], reduction="sum")
        expected = torch.autograd.grad(own / max(size, 1), parameters)
        assert_close([gradients[one] for gradients in found], expected, **TIGHT)


def test_hooks_see_the_trained_layers_inputs_and_are_removed():
    network = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    x = torch.randn(5, 3)
    seen: list[torch.Tensor] = []
    with ExampleGradients(network, list(network[2].parameters())).hooked(on_input=seen.append):
        network(x)
    network(x)
    assert_close(seen, [network[:2](x)])


def test_the_bytes_of_gradients_are_those_of_the_tensors_that_are_held_at_once():
    network = nn.Linear(3, 2)
    gradients = gradients_by_example(
        network, list(network.parameters()), torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    )
    sums = ClippedExamples(list(network.parameters()), StepNoise(1.0, 1.0)).sums
    largest = gradients[0]
    held = [*gradients, *sums, largest.double(), largest.clone()]
    assert ExampleGradients(network, list(network.parameters())).num_bytes(5) == sum(
        tensor.nbytes for tensor in held
    )
    assert ExampleGradients(network, []).num_bytes(5) == 0


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.filterwarnings("ignore:There is a performance drop")
@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_per_example_gradients_equal_opacus(name):
    model, parameters, x, y = adapted(name, layer_form="factored")
    found = gradients_by_example(model, parameters, x, y)
    other = copy.deepcopy(model)
    frozen = {n for n, p in model.named_parameters() if id(p) not in set(map(id, parameters))}
    names = {id(p): n for n, p in model.named_parameters()}
    own = dict(other.named_parameters())
    for n in frozen:
        own[n].requires_grad_(False)
    for module in other.modules():  # Opacus supports no layer with buffers
        module.__dict__.update(module._buffers)
        module._buffers.clear()
    sampled = opacus.GradSampleModule(other, batch_first=True, loss_reduction="mean", strict=False)
    F.cross_entropy(sampled(x), y).backward()
    assert_close(found, [own[names[id(p)]].grad_sample for p in parameters], **TIGHT)


@pytest.mark.parametrize("name", ["ravan", "fedit"])
def test_in_bfloat16_per_example_gradients_agree_within_its_precision(name):
    model, parameters, x, y = adapted(name)
    with torch.autocast("cpu", torch.bfloat16):
        found = gradients_by_example(model, parameters, x, y)
    assert all(gradients.dtype == torch.float32 for gradients in found)
    expected = gradients_by_loop(model, parameters, x, y)
    size = float(joint_norms(expected).max())
    assert joint_norms([f.double() - e for f, e in zip(found, expected, strict=True)]).max() < (
        0.05 * size
    )


@pytest.mark.parametrize("name", BY_EXAMPLE)
@pytest.mark.parametrize("norm", [1e-3, 0.3, 1e6])
def test_one_example_changes_the_sum_by_at_most_the_clip_norm(name, norm):
    """Each example in turn is removed; the norm is over all trained parameters together."""
    model, parameters, x, y = adapted(name, 0.7)

    def summed(rows):
        clipped = ClippedExamples(parameters, StepNoise(1.0, norm))
        clipped.add(gradients_by_example(model, parameters, x[rows], y[rows]))
        return [total.clone() for total in clipped.sums]

    complete = summed(list(range(EXAMPLES)))
    norms = joint_norms(gradients_by_loop(model, parameters, x, y))
    for one in range(EXAMPLES):
        without = summed([row for row in range(EXAMPLES) if row != one])
        pairs = zip(complete, without, strict=True)
        moved = joint_norms([(a - b)[None] for a, b in pairs]).item()
        assert 0 < moved <= norm * (1 + 1e-6)
        assert moved == pytest.approx(min(norm, float(norms[one])), rel=1e-3)


@pytest.mark.parametrize("parts", [[5], [2, 3], [1, 1, 1, 1, 1]])
def test_the_sum_does_not_depend_on_microbatches(parts):
    model, parameters, x, y = adapted("ravan", 0.4)
    clipped = ClippedExamples(parameters, StepNoise(1.0, 0.5))
    for rows in torch.arange(EXAMPLES).split(parts):
        clipped.add(gradients_by_example(model, parameters, x[rows], y[rows]))
    exact = ClippedExamples(parameters, StepNoise(1.0, 0.5))
    exact.add(gradients_by_loop(model, parameters, x, y))
    assert_close(clipped.sums, exact.sums, **TIGHT)


# Refusals.


class Doubled(nn.Linear):
    """A linear layer that computes something else."""

    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.LayerNorm(3), "a trained layer is a LayerNorm, 3, without a rule"),
        (nn.Conv1d(3, 3, 1), "a trained layer is a Conv1d, 3"),
        (nn.Bilinear(3, 3, 3), "a trained layer is a Bilinear, 3"),
        (Doubled(3, 3), "a trained layer is a Doubled, 3"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_layers_without_a_rule_are_refused_by_name(layer, message):
    network = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), layer)
    check_trained(network, list(network[0].parameters()))
    with pytest.raises(ValueError, match=message):
        check_trained(network, list(network.parameters()))
    mixing = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))  # also if it is frozen
    with pytest.raises(ValueError, match="the model has a BatchNorm1d, 1, which mixes"):
        check_trained(mixing, list(mixing[0].parameters()))


class Mixes(nn.Module):
    """Subtract the mean of the batch."""

    def forward(self, x):
        return x - x.mean(0, keepdim=True)


def with_first(gradients, value):
    """Return the tensors with another first number of all."""
    first = gradients[0].clone()
    first.view(-1)[0] = value
    return [first, *gradients[1:]]


@pytest.mark.parametrize(("between", "fails"), [(nn.Tanh(), False), (Mixes(), True)])
def test_dependent_examples_are_detected(between, fails):
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 3), between, nn.Linear(3, 2))
    parameters = list(network.parameters())
    x, y = torch.randn(2, 3), torch.tensor([0, 1])
    alone, together = (gradients_by_example(network, parameters, x[:n], y[:n]) for n in (1, 2))
    if fails:
        with pytest.raises(ValueError, match="depends on the other examples of its batch"):
            check_independent(alone, together)
    else:
        check_independent(alone, together)
        # NaN alone reveals nothing; NaN only in company shows a dependence. One number is enough.
        broken = with_first(together, torch.nan)
        with pytest.raises(ValueError, match="from the untrained model that are not finite"):
            check_independent(with_first(alone, torch.inf), broken)
        for one, other in ((alone, broken), (broken, together)):
            with pytest.raises(ValueError, match="depends on the other examples of its batch"):
                check_independent(one, other)


def test_gradients_that_differ_by_less_than_a_thousandth_are_independent():
    alone = [torch.randn(1, 3, 2), torch.randn(1, 2)]
    check_independent([torch.zeros(1, 3)], [torch.zeros(2, 3)])
    check_independent(alone, [1.0009 * gradient for gradient in alone])
    with pytest.raises(ValueError, match="depends on the other examples of its batch"):
        check_independent(alone, [1.0011 * gradient for gradient in alone])


def test_a_layer_that_is_used_twice_counts_twice():
    torch.manual_seed(0)
    linear = nn.Linear(3, 3)
    network = nn.Sequential(linear, nn.Tanh(), linear)
    x, y = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    parameters = list(linear.parameters())
    expected = gradients_by_loop(network, parameters, x, y)
    assert_close(gradients_by_example(network, parameters, x, y), expected, **TIGHT)
