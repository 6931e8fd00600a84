"""A quantized backbone: equal up to rounding, trained, and exported in full precision."""

import sys
from typing import Any

import pytest
import torch

from ravan_flwr import result_of, simulate
from ravan_flwr.adapters import multihead
from ravan_flwr.adapters.stored import BITS, dense_weight, quantizable, quantize, weight_norm
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.results.export import merged_network
from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.local_steps import ClientWork, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from ravan_flwr.training.step import TrainingSettings
from tests.short_runs import records_of
from tests.support.tiny import small_decoder

pytest.importorskip("bitsandbytes")

FROZEN = [name for name, listed in METHODS.items() if listed.frozen_backbone and name != "none"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return small_decoder(tmp_path_factory.mktemp("quantized")) | {
        "num-rounds": 2, "local-steps": 2, "tracking": "none",
    }  # fmt: skip


@pytest.fixture(scope="module")
def pretrained_weights(settings):
    """Return name -> pretrained weight."""
    return dict(ModelAndData(read_config(settings)).model.network.named_parameters())


def logits_of(loaded):
    (first, *_) = loaded.test_sets.values()
    batch = loaded.task.collate(first.take(first.rows[:8]))
    batch.pop("labels")
    with torch.inference_mode():
        return loaded.model.network.eval()(**batch).logits


@pytest.mark.parametrize("dtype", BITS)
def test_a_quantized_network_is_equal_up_to_rounding(dtype, settings):
    full_precision = ModelAndData(read_config(settings))
    quantized = ModelAndData(read_config(settings | {"backbone-dtype": dtype}))
    assert full_precision.backbone_fingerprint == quantized.backbone_fingerprint
    assert full_precision.model.method.size == quantized.model.method.size
    expected, actual = logits_of(full_precision), logits_of(quantized)
    assert not torch.equal(expected, actual)
    tolerance = {"8bit": 0.1, "4bit": 0.6}[dtype]
    assert (actual - expected).abs().max() < tolerance * expected.abs().max()
    names = {type(module).__name__ for module in quantized.model.network.modules()}
    small = {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[dtype]
    linear = {name for name in names if "Linear" in name}
    assert linear == {small, "MultiHeadLinear", "Linear"}
    head = quantized.model.network.get_submodule("score")
    assert type(head) is torch.nn.Linear


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_are_dequantized_to_the_computations_precision(precision, settings, monkeypatch):
    """Else a step in bfloat16 would first write each weight in float32, with twice the bytes."""
    import bitsandbytes.functional as F

    unpacked, unpack = [], F.dequantize_4bit

    def record_unpacked(*arguments, **named):
        unpacked.append(unpack(*arguments, **named))
        return unpacked[-1]

    monkeypatch.setattr(F, "dequantize_4bit", record_unpacked)
    config = read_config(settings | {"backbone-dtype": "4bit", "precision": precision})
    loaded = ModelAndData(config)
    examples, state = loaded.partition(0, 4).train, loaded.model.initial_state()
    steps = TrainingSettings(1, 4, 1e-3, precision)
    work = ClientWork(examples, state, 1.0, steps, ClientRound(0, 1, 0))
    train_locally(loaded.model, loaded.task, work)
    assert {weight.dtype for weight in unpacked} == {getattr(torch, precision)}


# Every method with both quantizations; precisions alternate, so that neighbours have the others.
PRECISIONS = ("float32", "bfloat16")
RUNS = [
    (dtype, method, PRECISIONS[(position + number) % 2])
    for number, method in enumerate(FROZEN)
    for position, dtype in enumerate(BITS)
]


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("dtype", "method", "precision"), RUNS)
def test_a_run_trains_and_its_export_has_full_precision(
    dtype, method, precision, settings, pretrained_weights, tmp_path
):
    run_settings = settings | {"backbone-dtype": dtype, "method": method, "precision": precision}
    run = simulate(run_settings | {"output-dir": str(tmp_path)}, 2)
    assert run.summary["rejected"] == 0
    client = 0 if METHODS[method].personalised else None
    with result_of(run.run_dir, client) as loaded:
        deltas = loaded.model.method.delta_weights(loaded.model.adapters)
        assert all(delta.abs().max() > 0 for delta in deltas)
        merged = merged_network(loaded)
        for layer, delta in zip(loaded.model.layers, deltas, strict=True):
            weight = merged.get_parameter(f"{layer.name}.weight")
            old = pretrained_weights[f"{layer.name}.base.weight"]
            torch.testing.assert_close(weight, old + delta, rtol=1e-5, atol=1e-6)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("scoring", ["weight", "gradient"])
@pytest.mark.parametrize("dtype", BITS)
def test_heads_are_selected_by_score(dtype, scoring, settings, tmp_path):
    run_settings = settings | {"backbone-dtype": dtype, "scoring": scoring, "budgets": "uniform"}
    run = simulate(run_settings | {"output-dir": str(tmp_path)}, 2)
    assert run.summary["rejected"] == 0
    clients = [client for record in records_of(run) for client in record["clients"]]
    assert any(client["heads"] < 4 for client in clients)
    linear = torch.nn.Linear(4, 8)
    norm = float(linear.weight.detach().norm())
    assert weight_norm(linear) == pytest.approx(norm)
    network = torch.nn.ModuleDict({"a": linear})
    quantize(network, dtype, [])
    small: Any = network["a"]
    assert weight_norm(small) == pytest.approx(norm)


@pytest.mark.parametrize("dtype", BITS)
def test_a_large_bias_does_not_change_the_dequantized_weight(dtype):
    """`dense_weight` computes the weight from the layer's outputs for unit vectors."""
    torch.manual_seed(0)
    plain, biased = (torch.nn.Linear(64, 64, bias=bias) for bias in (False, True))
    biased.weight.data.copy_(plain.weight.data)
    biased.bias.data.fill_(20.0)
    network = torch.nn.ModuleDict({"plain": plain, "biased": biased})
    quantize(network, dtype, [])
    small: Any = network["biased"]
    assert torch.equal(dense_weight(small), dense_weight(network["plain"]))
    assert float(small.bias[0]) == 20.0


def test_without_bitsandbytes_an_error_names_the_package(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match="backbone-dtype: .*pip install bitsandbytes"):
        quantize(torch.nn.Sequential(torch.nn.Linear(2, 2)), "4bit", [])


@pytest.mark.parametrize("dtype", BITS)
def test_the_plan_counts_quantized_weights(dtype, settings, monkeypatch):
    monkeypatch.setattr(multihead, "merges", lambda *_: False)  # as with quantized weights
    full_precision, quantized = (
        step_memory(read_config(settings | {"backbone-dtype": kind}), 1.0)
        for kind in ("float32", dtype)
    )
    network = ModelAndData(read_config(settings)).model.network
    linears = quantizable(network, [network.get_parameter("score.weight")]).values()
    expected = sum(linear.weight.numel() for linear in linears) * (32 - BITS[dtype]) / 8
    assert full_precision.weights - quantized.weights == pytest.approx(expected, abs=1)
    assert full_precision.activations == quantized.activations
