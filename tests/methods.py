"""A small network for every method, and clients that train in no time."""

import dataclasses
import math

import torch
from torch import nn

from ravan_flwr.adapters import Layer
from ravan_flwr.methods import get_method
from ravan_flwr.methods.base import Settings
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import Aggregate, CalibrationSums
from ravan_flwr.server.update_norm_check import UpdateNormCheck

LAYERS = (Layer("q", 6, 5), Layer("v", 4, 7))  # rectangular, both ways
SETTINGS = Settings(
    seed=0, lora_rank=2, rank=2, lora_scale=1.0, heads=3, init="normal",
    calibration_steps=2, scaling="trained", scoring="random", selection="layer",
)  # fmt: skip
# For all other methods the aggregate's delta-weight is the mean of the clients'.
# (The last four of these have a model for each client; in `centralised` one client trains.)
INEXACT = (
    "fedit", "slora", "hetlora", "flexlora", "lora-fair", "raflora", "fedrot-lora", "fed-plora",
    "fslora", "frlora", "florist", "centralised", "fedrpca", "fedalt", "feddpa", "fedsa-lora",
    "local",
)  # fmt: skip


class Network(nn.Module):
    """Linear layers to adapt, another pretrained layer, and a classifier."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        for layer in layers:
            self.add_module(layer.name, nn.Linear(layer.in_features, layer.out_features))
        self.norm = nn.LayerNorm(3)
        self.classifier = nn.Linear(3, 2)


def build_with_network(name, layers=LAYERS, **changes):
    """Return method, adapters and network."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, thrice
    network = Network(layers).requires_grad_(False)
    pretrained = {k: p for k, p in network.named_parameters() if not k.startswith("classifier")}
    size = sum(p.numel() for p in pretrained.values())
    method = get_method(name)(dataclasses.replace(SETTINGS, **changes), layers, size)
    return method, method.install(network, pretrained), network


def build(name="ravan", **changes):
    """Return method and adapters."""
    return build_with_network(name, **changes)[:2]


def calibration_sums(method):
    """Return the sums of a calibration round, without a limit."""
    return CalibrationSums(method.calibration, None, math.inf)


def train_client(method, adapters, state, fraction, seed, personal=None):
    """Return a client's upload after a random change of its trainable parameters."""
    fraction = fraction if method.can_train(fraction) else 1.0
    random = generator(seed, "client")
    method.load(adapters, method.broadcast(state, fraction))
    if personal is not None:
        method.personal.put(adapters, personal)
    method.choose(adapters, fraction, random, lambda: None)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.add_(torch.randn(parameter.shape, generator=random))
    return method.upload(adapters)


class FakeTraining:
    """Local steps that add given changes to the weights."""

    def __init__(self, changes):
        self.changes = changes

    def train(self, parameters):
        with torch.no_grad():
            for parameter, change in zip(parameters, self.changes, strict=True):
                parameter.add_(change)


def aggregate(method, state, uploads):
    """Return the next state; uploads are (tensors, budget fraction) or with a weight as third."""
    total = Aggregate(method, state, UpdateNormCheck(1e9))
    for upload, fraction, *weight in uploads:
        total.check_and_add(upload, fraction if method.can_train(fraction) else 1.0, *weight)
    return total.close()


def some_state(method, adapters, seed=1):
    """Return the state after a round of three clients from the initial state."""
    state = method.initial_state(adapters)
    uploads = [(train_client(method, adapters, state, 1.0, seed + i), 1.0) for i in range(3)]
    return aggregate(method, state, uploads)


def build_mid_run(name="ravan", **changes):
    """Return method, adapters, and the state after a round."""
    method, adapters = build(name, **changes)
    return method, adapters, some_state(method, adapters)


def personal_state(method, adapters):
    """Return the personal parameters in the adapters; None if the method has none."""
    return None if method.personal is None else method.personal.collect(adapters)


def deltas(method, adapters, state, personal=None):
    """Return every layer's delta-weight under a global state and a client's personal parameters."""
    method.load(adapters, state)
    if personal is not None:
        method.personal.put(adapters, personal)
    return [delta.double() for delta in method.delta_weights(adapters)]


def assert_close(actual, expected, **how):
    """Compare two lists of tensors."""
    how = how or {"rtol": 1e-4, "atol": 1e-5}
    for actual_tensor, expected_tensor in zip(actual, expected, strict=True):
        torch.testing.assert_close(actual_tensor.double(), expected_tensor.double(), **how)
