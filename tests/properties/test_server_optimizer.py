"""The server optimiser equals Flower's FedAvgM and FedAdam's formula."""

import math

import numpy as np
import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvgM

from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods.base import Tensors
from ravan_flwr.server.aggregation import ServerOptimizer
from tests.hand_made import as_reply
from tests.methods import assert_close


def means(number=4):
    random = torch.Generator().manual_seed(0)
    return [
        {"H": torch.randn(3, 2, generator=random), "classifier": torch.randn(4, generator=random)}
        for _ in range(number)
    ]


def run(optimizer, start, rounds):
    moments: Tensors = {}
    state, states = start, []
    for mean in rounds:
        copies = {k: v.clone() for k, v in state.items()}
        new, moments = optimizer.step(state, mean, moments)
        assert all(torch.equal(state[k], copies[k]) for k in state)  # the old state is unchanged
        state = new
        states.append(state)
    return states


def test_without_an_optimiser_and_with_momentum_zero_and_rate_one_the_state_is_the_mean():
    start, *rounds = means()
    assert run(ServerOptimizer("none", 1.0, 0.9), start, rounds) == rounds
    found = run(ServerOptimizer("momentum", 1.0, 0.0), start, rounds)
    for got, mean in zip(found, rounds, strict=True):
        assert_close(got.values(), mean.values(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("rate", "beta"), [(1.0, 0.9), (0.3, 0.5)])
def test_momentum_equals_flowers_fedavgm(rate, beta):
    InProcessGrid({}, 1)  # messages need a task's identity
    start, *rounds = means()
    theirs = FedAvgM(server_learning_rate=rate, server_momentum=beta)
    theirs.current_arrays = ArrayRecord(start)
    for mean, ours in zip(
        rounds, run(ServerOptimizer("momentum", rate, beta), start, rounds), strict=True
    ):
        content = RecordDict(
            {"arrays": ArrayRecord(mean), "metrics": MetricRecord({"num-examples": 1})}
        )
        arrays, _ = theirs.aggregate_train(1, [as_reply(content)])
        assert arrays is not None
        for name, array in arrays.items():
            np.testing.assert_allclose(ours[name].numpy(), array.numpy(), rtol=1e-5, atol=1e-6)


def test_adam_equals_its_formula():
    start, *rounds = means()
    state = {k: v.double() for k, v in start.items()}
    m = {k: torch.zeros_like(v) for k, v in state.items()}
    v = {k: torch.zeros_like(x) for k, x in state.items()}
    got = run(ServerOptimizer("adam", 0.1, 0.9), start, rounds)
    for t, (mean, ours) in enumerate(zip(rounds, got, strict=True), start=1):
        for key, old in state.items():
            step = mean[key].double() - old
            m[key] = 0.9 * m[key] + 0.1 * step
            v[key] = 0.99 * v[key] + 0.01 * step.square()
            m_hat, v_hat = m[key] / (1 - 0.9**t), v[key] / (1 - 0.99**t)
            state[key] = old + 0.1 * m_hat / (v_hat.sqrt() + 1e-3)
        assert_close(ours.values(), state.values(), rtol=1e-5, atol=1e-5)
    assert math.isfinite(float(ours["H"].sum()))
