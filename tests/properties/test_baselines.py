"""Every baseline against the definition in its paper, by plain loops."""

import copy
from typing import Any

import pytest
import torch
from flwr.app import ArrayRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import FedAvg
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from ravan_flwr.adapters import Layer
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import affordable
from ravan_flwr.methods.lora import Residual
from ravan_flwr.seeding import ClientRound, generator
from ravan_flwr.training.batching import training_batches
from ravan_flwr.training.local_steps import ClientWork, calibrate_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings
from tests.hand_made import as_reply
from tests.methods import (
    LAYERS,
    aggregate,
    assert_close,
    build,
    build_mid_run,
    build_with_network,
    deltas,
    train_client,
)
from tests.reference import best_of_rank, hetlora_mean, weighted_mean

SHARES = st.sampled_from([0.25, 0.5, 0.75, 1.0])
CLIENTS = st.lists(st.tuples(SHARES, st.integers(0, 99)), min_size=1, max_size=5)


def replies(method, adapters, state, clients):
    """Return uploads by (fraction, seed), with their budget fractions."""
    return [(train_client(method, adapters, state, *client), client[0]) for client in clients]


def train_all(method, adapters, state, seeds):
    return replies(method, adapters, state, [(1.0, seed) for seed in seeds])


# FedIT


@given(st.lists(st.integers(0, 99), min_size=1, max_size=5))
def test_fedits_error_is_the_covariance_of_the_clients_factors(seeds):
    method, adapters, state = build_mid_run("fedit", lora_scale=0.5)
    uploads = train_all(method, adapters, state, seeds)
    new = aggregate(method, state, uploads)
    pairs = [method.split(upload) for upload, _ in uploads]
    for layer, got in enumerate(deltas(method, adapters, new)):
        Bs, As = ([pair[i][layer].double() for pair in pairs] for i in (0, 1))
        B, A = torch.stack(Bs).mean(0), torch.stack(As).mean(0)
        exact = torch.stack([0.5 * b @ a for b, a in zip(Bs, As, strict=True)]).mean(0)
        missing = torch.stack([0.5 * (b - B) @ (a - A) for b, a in zip(Bs, As, strict=True)])
        assert_close([exact - got], [missing.mean(0)])
        if len(set(seeds)) > 1:
            assert missing.mean(0).norm() > 0.01 * exact.norm()


@pytest.mark.parametrize("examples", [[1, 1, 1], [3, 10, 200]])
def test_fedit_equals_flowers_fedavg(examples):
    method, adapters, state = build_mid_run("fedit")
    uploads = [upload for upload, _ in train_all(method, adapters, state, range(3))]
    InProcessGrid({}, 1)  # messages need a task's identity
    replies = []
    for upload, number in zip(uploads, examples, strict=True):
        metrics = MetricRecord({"num-examples": number, "loss": 1.0})
        content = RecordDict({"arrays": ArrayRecord(upload), "metrics": metrics})
        replies.append(as_reply(content))
    arrays, _ = FedAvg().aggregate_train(1, replies)
    ours = aggregate(
        method, state, [(u, 1.0, float(n)) for u, n in zip(uploads, examples, strict=True)]
    )
    assert arrays is not None
    for name, tensor in arrays.to_torch_state_dict().items():
        torch.testing.assert_close(ours[name], tensor.float(), rtol=1e-6, atol=1e-7)


def test_lora_starts_from_the_pretrained_weights():
    others = {"ravan", "fedalt", "fedrpca", "full", "fed-sb", "none"}
    # FRLoRA's factors start elsewhere: test_rivals.py.
    for name in sorted(METHODS.keys() - others - {"frlora"}):
        method, adapters = build(name)
        state = method.initial_state(adapters)
        for delta in deltas(method, adapters, state):
            assert not delta.any()
        for adapter, layer in zip(adapters, LAYERS, strict=True):
            norms = build(name, rank=4)[1][0].A.norm(dim=1)
            assert adapter.A.shape == (2, layer.in_features)
            assert 0.2 < norms.mean() < 2


# FedEx-LoRA


def test_a_residual_is_sent_in_its_smallest_form():
    layer = Layer("q", 6, 5)  # 30 numbers; a rank costs 11
    assert [Residual.size(layer, rank) for rank in (0, 1, 2, 3, 9)] == [0, 11, 22, 30, 30]
    method, adapters = build("fedex-lora", rank=1)
    state, sizes = method.initial_state(adapters), []
    for seed in range(4):
        sent = train_all(method, adapters, state, [seed, seed + 10])  # rank 1 a round
        state = aggregate(method, state, sent)
        sizes.append(len(state["residual"]))
    assert sizes == [11 + 11, 22 + 22, 30 + 28, 30 + 28]
    assert state["residual-rank"].tolist() == [4]
    with pytest.raises(ValueError, match=r"residual is torch.float32 .*expected"):
        method.load(adapters, state | {"residual": state["residual"][1:]})


# HetLoRA and FlexLoRA


@given(CLIENTS)
def test_hetlora_pads_and_weights_by_the_norm_of_the_product(clients):
    method, adapters, state = build_mid_run("hetlora", rank=4)
    uploads = replies(method, adapters, state, clients)
    Bs, As = method.split(aggregate(method, state, uploads))
    for layer in range(len(LAYERS)):
        pairs = [method.split(upload) for upload, _ in uploads]
        expected = hetlora_mean([(B[layer], A[layer]) for B, A in pairs], 4)
        assert_close([Bs[layer], As[layer]], expected)


def test_an_unchanged_hetlora_layer_keeps_its_values():
    method, adapters = build("hetlora")
    state = method.initial_state(adapters)  # B is zero, and so is every norm
    new = aggregate(method, state, [(state, 1.0), (state, 1.0)])
    assert all(torch.equal(new[key], state[key]) for key in state)


@pytest.mark.parametrize("name", ["hetlora", "flexlora", "raflora"])
@pytest.mark.parametrize("fraction", [0.1, 0.25, 0.5, 0.75, 1.0])
def test_a_client_receives_the_first_ranks(name, fraction):
    method, adapters, state = build_mid_run(name, rank=4)
    rank = affordable(fraction, 4)
    Bs, As = method.split(state)
    method.load(adapters, method.broadcast(state, fraction))
    for adapter, B, A in zip(adapters, Bs, As, strict=True):
        assert torch.equal(adapter.B, B[:, :rank])
        assert torch.equal(adapter.A, A[:rank])


@given(CLIENTS)
def test_flexlora_is_the_best_low_rank_approximation_of_the_mean_product(clients):
    method, adapters, state = build_mid_run("flexlora", rank=4)
    uploads = replies(method, adapters, state, clients)
    new = aggregate(method, state, uploads)
    Bs, As = method.split(new)
    for layer, got in enumerate(deltas(method, adapters, new)):
        products = []
        for upload, _ in uploads:
            B, A = (part[layer].double() for part in method.split(upload))
            products.append(B @ A)
        mean = weighted_mean(products, [1.0] * len(products))
        assert_close([got], [best_of_rank(mean, 4)])
        # A has orthonormal rows, also beyond the rank of the mean; B has the singular values.
        assert_close([As[layer] @ As[layer].T], [torch.eye(4)])
        values = torch.linalg.svdvals(mean)[:4]
        assert_close([Bs[layer].norm(dim=0)], [values], rtol=1e-4, atol=1e-4)


# Fed-SB


def test_fed_sbs_first_round_is_full_fine_tuning_of_the_adapted_matrices():
    """A client sends the change that a plain loop over the same batches makes to the weights."""
    loaded = ModelAndData(read_config({"method": "fed-sb", "seed": 5}))
    model, examples = loaded.model, loaded.partition(0, 4).train
    steps = TrainingSettings(num_steps=3, batch_size=8, learning_rate=1e-3, precision="float32")
    work = ClientWork(examples, model.initial_state(), 1.0, steps, ClientRound(5, 0, 0))
    sent = calibrate_locally(model, loaded.task, work).upload["change"]

    plain: Any = copy.deepcopy(model.network).train()
    matrices = [plain.get_submodule(layer.name).base.weight for layer in model.layers]
    before = [matrix.detach().clone() for matrix in matrices]
    plain.requires_grad_(False)
    optimizer = torch.optim.Adam([m.requires_grad_(True) for m in matrices], lr=1e-3)
    order = training_batches(len(examples), 8, generator(5, "batches", 0, 0))
    for _ in range(3):
        optimizer.zero_grad()
        loaded.task.loss(plain, examples.take(next(order))).backward()
        optimizer.step()
    changes = [m.detach() - old for m, old in zip(matrices, before, strict=True)]
    assert_close([sent], [torch.cat([c.flatten() for c in changes])], rtol=1e-3, atol=1e-6)
    assert sent.abs().max() > 1e-3


# Full fine-tuning


def test_full_fine_tuning_trains_all_but_the_classifier():
    method, adapters, network = build_with_network("full")
    state = method.initial_state(adapters)
    upload = train_client(method, adapters, state, 1.0, 0)
    names = {name for name, p in network.named_parameters() if p.requires_grad}
    assert names == {n for n, _ in network.named_parameters() if not n.startswith("classifier")}
    assert upload["weights"].shape == state["weights"].shape == (method.size,)
    assert (upload["weights"] != state["weights"]).all()
    method.load(adapters, {"weights": upload["weights"]})
    flat = torch.cat([p.flatten() for n, p in network.named_parameters() if n in names])
    assert torch.equal(flat, upload["weights"])
    assert isinstance(network.get_submodule("q"), nn.Linear)
