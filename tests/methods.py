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
# Of all others the aggregate's delta-weight is the mean of the clients'.
# (Of these the last four have one model for each client, and of `centralised` one client trains.)
INEXACT = (
    "fedit", "slora", "hetlora", "flexlora", "lora-fair", "raflora", "fedrot-lora", "fed-plora",
    "centralised", "fedrpca", "fedalt", "feddpa", "fedsa-lora", "local",
)  # fmt: skip


class Network(nn.Module):
    """Linear layers to adapt, something else that is pretrained, and a classifier."""

    def __init__(self, layers=LAYERS):
        super().__init__()
        for layer in layers:
            self.add_module(layer.name, nn.Linear(layer.in_features, layer.out_features))
        self.norm = nn.LayerNorm(3)
        self.classifier = nn.Linear(3, 2)


def build_whole(name, layers=LAYERS, **changes):
    """Method, adapters and network; without a `rank` in `changes`, it is 2."""
    torch.default_generator.manual_seed(0)  # torch.manual_seed formats the stack, thrice
    network = Network(layers).requires_grad_(False)
    pretrained = {k: p for k, p in network.named_parameters() if not k.startswith("classifier")}
    size = sum(p.numel() for p in pretrained.values())
    method = get_method(name)(dataclasses.replace(SETTINGS, **changes), layers, size)
    return method, method.install(network, pretrained), network


def build(name="ravan", **changes):
    """Method and adapters."""
    return build_whole(name, **changes)[:2]


def calibration_sums(method):
    """Sums of a calibration round, without a limit."""
    return CalibrationSums(method.calibration, None, math.inf)


def train_client(method, adapters, state, fraction, seed, own=None):
    """What one client sends, after some arbitrary movement of what it may train."""
    fraction = fraction if method.can_train(fraction) else 1.0
    random = generator(seed, "client")
    method.load(adapters, method.broadcast(state, fraction))
    if own is not None:
        method.personal.put(adapters, own)
    method.choose(adapters, fraction, random, lambda: None)
    with torch.no_grad():
        for parameter in method.parameters(adapters):
            parameter.add_(torch.randn(parameter.shape, generator=random))
    return method.upload(adapters)


class FakeTraining:
    """Local steps that change the weights by what they are told."""

    def __init__(self, changes):
        self.changes = changes

    def train(self, parameters):
        with torch.no_grad():
            for parameter, change in zip(parameters, self.changes, strict=True):
                parameter.add_(change)


def aggregate(method, state, uploads):
    """The next state; uploads are (tensors, share) or (tensors, share, weight)."""
    pot = Aggregate(method, state, UpdateNormCheck(1e9))
    for upload, fraction, *weight in uploads:
        pot.offer(upload, fraction if method.can_train(fraction) else 1.0, *weight)
    return pot.close()


def some_state(method, adapters, seed=1):
    """A state in the middle of a run: some clients trained from the first."""
    state = method.initial_state(adapters)
    uploads = [(train_client(method, adapters, state, 1.0, seed + i), 1.0) for i in range(3)]
    return aggregate(method, state, uploads)


def personal_state(method, adapters):
    """What stays with the client that the adapters hold; None if nothing does."""
    return None if method.personal is None else method.personal.collect(adapters)


def deltas(method, adapters, state, own=None):
    """Every layer's delta-weight under a global state, for a client with that part of its own."""
    method.load(adapters, state)
    if own is not None:
        method.personal.put(adapters, own)
    return [delta.double() for delta in method.delta_weights(adapters)]


def assert_close(got, expected, **how):
    """Lists of tensors, one after the other."""
    how = how or {"rtol": 1e-4, "atol": 1e-5}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), **how)
