"""SLoRA's sparse first round, against numpy's decomposition, and FedIT after it."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import Scalar
from ravan_flwr.training.model_and_data import ModelAndData
from tests.methods import (
    LAYERS,
    FakeTraining,
    aggregate,
    build,
    build_with_network,
    calibration_sums,
    deltas,
    train_client,
)
from tests.short_runs import records_of, run, same_bits, saved


def change_of(seed, layer):
    return np.random.default_rng(seed).normal(size=(layer.out_features, layer.in_features))


def first_round(seeds, **changes):
    """Return the method after its first round, and the trained places of each matrix."""
    method, adapters = build("slora", **changes)
    sums = calibration_sums(method)
    for seed in seeds:
        work = FakeTraining([torch.tensor(change_of(seed, layer)).float() for layer in LAYERS])
        upload = method.calibration.run(adapters, work)
        assert sum(tensor.nbytes for tensor in upload.values()) == method.calibration.bytes_up
        sums.add(upload, 1.0)
    fixed, changed = sums.close()
    method.calibration.load(adapters, fixed)
    assert fixed == {}
    places = [set(chosen.tolist()) for chosen in method.calibration.positions()]
    return method, adapters, method.initial_state(adapters) | changed, places


@given(st.lists(st.integers(0, 99), min_size=1, max_size=3), st.sampled_from([1.0, 0.5]))
def test_the_lora_starts_at_the_best_approximation_of_the_mean_sparse_change(seeds, scale):
    method, adapters, state, places = first_round(seeds, lora_scale=scale)
    for layer, chosen, delta in zip(LAYERS, places, deltas(method, adapters, state), strict=True):
        dense = np.zeros((layer.out_features, layer.in_features))
        for row in range(layer.out_features):
            for column in range(layer.in_features):
                if row * layer.in_features + column in chosen:
                    dense[row, column] = np.mean([change_of(s, layer)[row, column] for s in seeds])
        U, S, Vt = np.linalg.svd(dense)
        np.testing.assert_allclose(delta, U[:, :2] * S[:2] @ Vt[:2], atol=1e-6)
    for adapter in adapters:
        torch.testing.assert_close(adapter.A @ adapter.A.T, torch.eye(2), atol=1e-6, rtol=0)


def test_the_first_round_trains_as_many_parameters_as_the_lora():
    method, _, _, places = first_round([0], rank=1)
    for layer, chosen in zip(LAYERS, places, strict=True):
        assert len(chosen) == layer.out_features + layer.in_features
    assert method.calibration.bytes_up == 4 * method.trainable_parameters()
    other = [set(p.tolist()) for p in build("slora", rank=1, seed=1)[0].calibration.positions()]
    assert other != places
    all_places = build("slora", rank=4)[0].calibration  # more than a matrix of 4 x 7 has
    assert all_places.bytes_up == 4 * (6 * 5 + 4 * 7)


def test_after_the_first_round_it_equals_fedit():
    method, adapters, state, _ = first_round([0, 1])
    fedit, others = build("fedit")
    found = []
    for one, held in ((method, adapters), (fedit, others)):
        uploads = [(train_client(one, held, state, 1.0, seed), 1.0) for seed in range(3)]
        found.append(aggregate(one, state, uploads))
    assert all(torch.equal(found[0][key], found[1][key]) for key in ("B", "A"))


def test_a_zero_change_is_refused():
    method, _ = build("slora")
    sums = calibration_sums(method)
    sums.add({"change": torch.zeros(sum(method.calibration.sizes))}, 1.0)
    with pytest.raises(ValueError, match=r"mean change of zero .* raise calibration-learning-rate"):
        sums.close()


def test_training_changes_the_sampled_places_alone_and_restores_weights():
    """Real gradients of a real loss are used: Adam moves nothing else."""
    method, adapters, network = build_with_network("slora", rank=1)
    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    moved: list[torch.Tensor] = []

    class Training:
        def train(self, parameters):
            optimizer = torch.optim.Adam(parameters, lr=0.1)
            starts = [parameter.detach().clone() for parameter in parameters]
            for _ in range(3):
                optimizer.zero_grad()
                for adapter, layer in zip(adapters, LAYERS, strict=True):
                    adapter(torch.ones(2, layer.in_features)).square().sum().backward()
                optimizer.step()
            pairs = zip(parameters, starts, strict=True)
            moved.extend((end.detach() - start).flatten() for end, start in pairs)

    upload = method.calibration.run(adapters, Training())["change"]
    for change, chosen in zip(moved, method.calibration.positions(), strict=True):
        assert change.nonzero().flatten().tolist() == chosen.tolist()
    assert upload.tolist() == torch.cat([c[c.nonzero().flatten()] for c in moved]).tolist()
    after = network.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert not any(p.requires_grad for name, p in network.named_parameters() if "base" in name)


def test_weight_decay_leaves_the_other_places_as_they_are():
    """A plain loop has one AdamW over the places, and all else constant."""
    method, adapters, network = build_with_network("slora", rank=1)
    inputs = [torch.ones(2, layer.in_features) for layer in LAYERS]
    make_optimizer = partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
    expected = []
    for adapter, x, chosen in zip(adapters, inputs, method.calibration.positions(), strict=True):
        W, b = adapter.base.weight.detach().clone(), adapter.base.bias.detach()
        start = W.flatten()[chosen]
        places = start.clone().requires_grad_()
        optimizer = make_optimizer([places])
        for _ in range(5):
            optimizer.zero_grad()
            whole = W.flatten().index_copy(0, chosen, places).view_as(W)
            (x @ whole.mT + b).square().sum().backward()
            optimizer.step()
        expected.append(places.detach() - start)

    class Training:
        def train(self, parameters):
            optimizer = make_optimizer(parameters)
            for _ in range(5):
                optimizer.zero_grad()
                for adapter, x in zip(adapters, inputs, strict=True):
                    adapter(x).square().sum().backward()
                optimizer.step()

    before = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    upload = method.calibration.run(adapters, Training())["change"]
    torch.testing.assert_close(upload, torch.cat(expected))
    assert all(torch.equal(tensor, before[k]) for k, tensor in network.state_dict().items())


@pytest.mark.slow
def test_a_run_starts_with_a_sparse_round_and_continues_from_it(tmp_path):
    settings: dict[str, Scalar] = {
        "method": "slora",
        "budgets": "skewed-right",
        "clients-per-round": 4,
    }
    whole = run(tmp_path / "whole", 20, settings)
    assert (whole.summary["rejected"], whole.summary["without-effect"]) == (0, [])
    ups = [[client["bytes-up"] for client in record["clients"]] for record in records_of(whole)]
    method = ModelAndData(read_config(settings)).model.method
    assert method.calibration is not None
    assert ups[0] == [method.calibration.bytes_up] * len(ups[1])
    assert method.calibration.bytes_up == method.upload_bytes(1.0)
    assert (whole.run_dir / "adapter" / "adapter_model.safetensors").is_file()
    first = run(tmp_path / "part", 20, settings, num_rounds=1)
    again = run(tmp_path / "part", 20, settings, resume=str(first.run_dir))
    assert same_bits(saved(whole), saved(again))
