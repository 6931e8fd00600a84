"""Laws of gradients by example: those of the loop over examples, in every layer and every form.

The oracle computes the gradient of one example's loss after the other, in float64, by autograd.
"""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ravan_flwr.adapters.by_example import RULES
from ravan_flwr.methods import METHODS
from ravan_flwr.privacy.example_gradients import ExampleGradients, check_apart, check_trained
from ravan_flwr.seeding import generator
from tests.methods import aggregate, build_whole, some_state

BY_EXAMPLE = [name for name, method in METHODS.items() if method.by_example]
EXAMPLES, TOKENS = 5, 4


class Together(nn.Module):
    """Send tokens through both adapted layers, one after the other, and classify their mean."""

    def __init__(self, network):
        super().__init__()
        self.network = network
        self.head = nn.Linear(network.v.base.out_features if hasattr(network.v, "base") else 4, 3)

    def forward(self, x):
        q = torch.tanh(self.network.q(x))
        v = self.network.v(torch.cat([q, q[..., :1]], -1))
        return self.head(torch.tanh(v).mean(1))


def adapted(name, share=1.0, **changes):
    """A model in the middle of a run, a client of that share, what it trains, and its examples."""
    method, adapters, network = build_whole(name, **changes if METHODS[name].has_heads else {})
    torch.manual_seed(3)
    model = Together(network)
    model.head.requires_grad_(True)
    state = some_state(method, adapters)
    share = share if method.can_train(share) else 1.0
    method.load(adapters, method.broadcast(state, share))
    method.choose(adapters, share, generator(1, "choose"), lambda: None)
    parameters = [*method.parameters(adapters), *model.head.parameters()]
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.3 * torch.randn(parameter.shape))
    x = torch.randn(EXAMPLES, TOKENS, 5)
    y = torch.tensor([0, 1, 2, 0, 1])
    return model, parameters, x, y


def loop(model, parameters, x, y):
    """The gradients of one example's loss after the other, in float64."""
    exact = copy.deepcopy(model).double()
    names = {id(p): name for name, p in model.named_parameters()}
    own = dict(exact.named_parameters())
    mine = [own[names[id(p)]] for p in parameters]
    each = []
    for one in range(len(x)):
        loss = F.cross_entropy(exact(x[one : one + 1].double()), y[one : one + 1])
        found = torch.autograd.grad(loss, mine, allow_unused=True)
        each.append(
            [torch.zeros_like(p) if g is None else g for p, g in zip(mine, found, strict=True)]
        )
    return [torch.stack(gradients) for gradients in zip(*each, strict=True)]


def fast(model, parameters, x, y):
    sizes = torch.ones(len(x))
    return ExampleGradients(model, parameters).of(lambda: F.cross_entropy(model(x), y), sizes)


@pytest.mark.parametrize("form", ["merged", "factored"])
@pytest.mark.parametrize("share", [1.0, 0.4])
@pytest.mark.parametrize("name", BY_EXAMPLE)
def test_gradients_by_example_are_those_of_the_loop(name, share, form):
    model, parameters, x, y = adapted(name, share, layer_form=form)
    expected = loop(model, parameters, x, y)
    for got, right in zip(fast(model, parameters, x, y), expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-4, atol=1e-6)
    assert any(gradients.any() for gradients in expected)
