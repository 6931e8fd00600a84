"""A backbone in few bits: the same network to the bits' rounding, trained and taken home whole."""

import json
import sys
from typing import Any

import pytest
import torch

from ravan_flwr import result_of, simulate
from ravan_flwr.adapters import multihead
from ravan_flwr.adapters.stored import BITS, dense_weight, quantizable, quantize, weight_norm
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.reports.export import merged_network
from ravan_flwr.seeding import ClientRound
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.local_steps import LocalSteps, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from testing.tiny import small_decoder

pytest.importorskip("bitsandbytes")

FROZEN = [name for name, listed in METHODS.items() if listed.frozen_backbone and name != "none"]


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return small_decoder(tmp_path_factory.mktemp("quantized")) | {
        "num-rounds": 2, "local-steps": 2, "report": False, "tracking": "none",
    }  # fmt: skip


@pytest.fixture(scope="module")
def whole(settings):
    """The pretrained weights, by name."""
    return dict(ModelAndData(read_config(settings)).model.network.named_parameters())


def logits_of(loaded):
    (first, *_) = loaded.test_sets.values()
    batch = loaded.task.collate(first.take(first.rows[:8]))
    batch.pop("labels")
    with torch.inference_mode():
        return loaded.model.network.eval()(**batch).logits


@pytest.mark.parametrize("how", BITS)
def test_the_network_is_the_same_to_the_bits_rounding(how, settings):
    whole = ModelAndData(read_config(settings))
    few = ModelAndData(read_config(settings | {"backbone-dtype": how}))
    assert whole.backbone_fingerprint == few.backbone_fingerprint
    assert whole.model.method.size == few.model.method.size
    expected, got = logits_of(whole), logits_of(few)
    assert not torch.equal(expected, got)
    assert (got - expected).abs().max() < {"8bit": 0.1, "4bit": 0.6}[how] * expected.abs().max()
    kinds = {type(m).__name__ for m in few.model.network.modules() if "Linear" in type(m).__name__}
    small = {"8bit": "Linear8bitLt", "4bit": "Linear4bit"}[how]
    assert kinds == {small, "MultiHeadLinear", "Linear"}
    head = few.model.network.get_submodule("score")
    assert type(head) is torch.nn.Linear


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_weights_are_unpacked_as_what_they_are_computed_with(precision, settings, monkeypatch):
    """A step in bfloat16 would else write each weight in float32 first, twice the bytes."""
    import bitsandbytes.functional as F

    unpacked, unpack = [], F.dequantize_4bit

    def seen(*given, **named):
        unpacked.append(unpack(*given, **named))
        return unpacked[-1]

    monkeypatch.setattr(F, "dequantize_4bit", seen)
    loaded = ModelAndData(
        read_config(settings | {"backbone-dtype": "4bit", "precision": precision})
    )
    train_locally(
        *(
            loaded.model,
            loaded.task,
            loaded.partition(0, 4).train,
            loaded.model.initial_state(),
            1.0,
        ),
        *(LocalSteps(1, 4, 1e-3, precision), ClientRound(0, 1, 0)),
    )
    assert {weight.dtype for weight in unpacked} == {getattr(torch, precision)}


# Every method in either number of bits, and in either precision; these two meet in its neighbours.
PRECISIONS = ("float32", "bfloat16")
RUNS = [
    (how, method, PRECISIONS[(place + number) % 2])
    for number, method in enumerate(FROZEN)
    for place, how in enumerate(BITS)
]


@pytest.mark.parametrize(("how", "method", "precision"), RUNS)
def test_a_run_trains_and_its_export_is_whole(how, method, precision, settings, whole, tmp_path):
    given = settings | {"backbone-dtype": how, "method": method, "precision": precision}
    run = simulate(given | {"output-dir": str(tmp_path)}, 2)
    records = [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]
    assert not [reply for record in records for reply in record["rejected"]]
    client = 0 if METHODS[method].personalised else None
    with result_of(run.run_dir, client) as loaded:
        deltas = loaded.model.method.delta_weights(loaded.model.adapters)
        assert all(delta.abs().max() > 0 for delta in deltas)
        merged = merged_network(loaded)
        for layer, delta in zip(loaded.model.layers, deltas, strict=True):
            weight = merged.get_parameter(f"{layer.name}.weight")
            old = whole[f"{layer.name}.base.weight"]
            torch.testing.assert_close(weight, old + delta, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scoring", ["weight", "gradient"])
@pytest.mark.parametrize("how", BITS)
def test_heads_are_chosen_by_score(how, scoring, settings, tmp_path):
    given = settings | {"backbone-dtype": how, "scoring": scoring, "budgets": "uniform"}
    run = simulate(given | {"output-dir": str(tmp_path)}, 2)
    assert run.summary["rejected"] == 0
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    assert any(client["heads"] < 4 for line in lines for client in json.loads(line)["clients"])
    weight = torch.randn(8, 4)
    linear = torch.nn.Linear(4, 8)
    linear.weight.data = weight
    network = torch.nn.ModuleDict({"a": linear})
    assert weight_norm(linear) == pytest.approx(float(weight.norm()))
    quantize(network, how, [])
    small: Any = network["a"]
    assert weight_norm(small) == pytest.approx(float(weight.norm()))


@pytest.mark.parametrize("how", BITS)
def test_a_large_bias_costs_no_bits_of_the_weight(how):
    """Which is read as what the layer computes of unit vectors."""
    torch.manual_seed(0)
    plain, biased = (torch.nn.Linear(64, 64, bias=bias) for bias in (False, True))
    biased.weight.data.copy_(plain.weight.data)
    biased.bias.data.fill_(20.0)
    network = torch.nn.ModuleDict({"plain": plain, "biased": biased})
    quantize(network, how, [])
    small: Any = network["biased"]
    assert torch.equal(dense_weight(small), dense_weight(network["plain"]))
    assert float(small.bias[0]) == 20.0


@pytest.mark.parametrize("method", [name for name in METHODS if not METHODS[name].frozen_backbone])
def test_methods_that_change_the_backbone_are_refused(method, settings, tmp_path):
    told = f"backbone-dtype = '4bit': got method '{method}', which changes pretrained weights"
    with pytest.raises(ValueError, match=told):
        simulate(
            settings | {"backbone-dtype": "4bit", "method": method, "output-dir": str(tmp_path)}, 2
        )


def test_without_the_library_it_says_what_to_install(settings, monkeypatch):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    with pytest.raises(ValueError, match=r"pip install 'ravan-flwr\[quantize\]'"):
        quantize(torch.nn.Sequential(torch.nn.Linear(2, 2)), "4bit", [])


@pytest.mark.parametrize("how", BITS)
def test_the_plan_counts_the_bits(how, settings, monkeypatch):
    monkeypatch.setattr(multihead, "merges", lambda *_: False)  # as of few bits
    whole, few = (
        step_memory(read_config(settings | {"backbone-dtype": kind}), 1.0)
        for kind in ("float32", how)
    )
    network = ModelAndData(read_config(settings)).model.network
    linears = quantizable(network, [network.get_parameter("score.weight")]).values()
    expected = sum(linear.weight.numel() for linear in linears) * (32 - BITS[how]) / 8
    assert whole.weights - few.weights == pytest.approx(expected, abs=1)
    assert whole.activations == few.activations
