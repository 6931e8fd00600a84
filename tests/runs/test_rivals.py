"""FSLoRA, FedMomentum, FRLoRA and FLoRIST in runs of two rounds, with whole and with small budgets.

The records have the bytes of the definition, and the export is the server's model.
"""

import itertools
import json
import math
from typing import Any

import pytest
import torch

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import frlora
from ravan_flwr.results.evaluation import result_of
from ravan_flwr.seeding import ClientRound
from ravan_flwr.tasks import MACRO_F1
from ravan_flwr.training.local_steps import ClientWork, make_training_settings, train_locally
from ravan_flwr.training.model_and_data import ModelAndData
from tests import short_runs
from tests.runs.in_use import check_logits, examples_and_logits
from tests.short_runs import records_of, same_bits, state_of

CLIENTS, RANK = 9, 4
# The budget fractions of the partitions with seed 12: two are whole.
SKEWED = [0.5, 0.25, 1.0, 0.5, 0.25, 0.75, 0.25, 1.0, 0.5]
BY_RANKS = ("fslora", "florist")
NAMES = ("fslora", "fedmomentum", "frlora", "florist")


@pytest.fixture(
    scope="module", params=itertools.product(NAMES, ("full", "skewed-right")), ids="-".join
)
def run(request, tmp_path_factory):
    method, budgets = request.param
    return short_runs.run(
        tmp_path_factory.mktemp(method), CLIENTS, method=method, budgets=budgets, seed=12,
        rank=RANK, clients_per_round=CLIENTS, classifier="frozen", lora_scale=0.5,
    )  # fmt: skip


@pytest.mark.slow(kept=2)
def test_clients_train_their_part_or_are_not_eligible(run):
    config = json.loads((run.run_dir / "config.json").read_text())
    fractions = SKEWED if config["budgets"] == "skewed-right" else [1.0] * CLIENTS
    by_ranks = run.summary["method"] in BY_RANKS
    trains = [p for p, fraction in enumerate(fractions) if by_ranks or fraction == 1.0]
    for record in records_of(run):
        assert [client["partition-id"] for client in record["clients"]] == trains
        assert [client["budget-fraction"] for client in record["clients"]] == [
            fractions[p] for p in trains
        ]
        assert record["not-eligible"] == [p for p in range(CLIENTS) if p not in trains]
        assert record["rejected"] == []
    assert run.summary["without-effect"] == []


@pytest.mark.slow(kept=2)
def test_the_records_have_the_bytes_of_the_definition(run):
    """Numbers have four bytes. Of r ranks a client sends r_c, and FSLoRA a bit for each."""
    method = run.summary["method"]
    with result_of(run.run_dir) as loaded:
        sides = [(layer.out_features, layer.in_features) for layer in loaded.model.method.layers]
    both = sum(map(sum, sides))
    numbers = 4 * RANK * both
    for place, record in enumerate(records_of(run)):
        for client in record["clients"]:
            r_c = max(1, math.floor(client["budget-fraction"] * RANK))
            bits = 1 if method == "fslora" else 0
            assert client["bytes-up"] == 4 * r_c * both + bits
        replies = len(record["clients"])
        # In round 2 there is the residual of round 1.
        ranks = {
            "fedmomentum": [(replies - 1) * RANK] * len(sides), "frlora": [2 * RANK] * len(sides),
            "florist": state_of(run, 1).get("residual-rank", torch.zeros(1)).tolist(),
        }.get(method, [])  # fmt: skip
        residual = sum(
            min(k * (out + inside), out * inside)
            for k, (out, inside) in zip(ranks, sides, strict=False)
        )
        counters = {"fslora": 0, "florist": 1 + len(sides)}.get(method, 1)
        down = (0 if method == "florist" else numbers) + 4 * (residual * place + counters)
        assert [client["bytes-down"] for client in record["clients"]] == [down] * replies
        assert record["bytes-down"] == replies * down
    assert run.summary["bytes-up"] == sum(record["bytes-up"] for record in records_of(run))


@pytest.mark.slow(kept=2)
def test_the_exported_model_is_the_servers(run):
    folder = run.run_dir / ("adapter" if run.summary["method"] == "fslora" else "merged")
    with result_of(run.run_dir) as loaded:
        final = run.summary["metrics"]["final"]
        assert loaded.evaluate() == pytest.approx({k: final[k] for k in final if k != MACRO_F1})
        expected = examples_and_logits(loaded)
        exported = check_logits(folder, loaded, expected)
        if folder.name == "adapter":
            return
        # The files have the pretrained weights plus what the state adds.
        weights = exported.state_dict()
        method: Any = loaded.model.method
        state = state_of(run, 2)
        pairs = zip(method.layers, loaded.model.adapters, strict=True)
        added = [part.dense() for part in method.residuals(state)]
        products = [torch.zeros_like(part) for part in added]
        if run.summary["method"] == "fedmomentum":  # the factors of the others start anew
            products = [0.5 * B @ A for B, A in zip(*method.split(state), strict=True)]
        for (layer, adapter), residual, product in zip(pairs, added, products, strict=True):
            expected_weight = adapter.pretrained + residual + product
            torch.testing.assert_close(
                weights[f"{layer.name}.weight"], expected_weight, rtol=1e-5, atol=1e-6
            )


@pytest.mark.parametrize("method", ["fedit", "fedmomentum", "frlora"])
def test_without_a_client_that_can_train_the_whole_the_run_is_refused(method, tmp_path):
    with pytest.raises(ValueError, match=f"'{method}' is trained whole or not at .*0.25, 0.75"):
        short_runs.run(tmp_path, 3, method=method, budgets="skewed-right", seed=1)


def test_a_client_of_frlora_decomposes_no_weight(monkeypatch):
    """It trains from the factors that the server made, to the bits of the server's own model."""
    config = read_config({"method": "frlora", "device": "cpu", "lora-rank": 2, "local-steps": 1})
    server = ModelAndData(config)
    state, examples = server.model.initial_state(), server.partition(0, 40).train
    settings = make_training_settings(config, 1, len(examples))
    work = ClientWork(examples, state, 1.0, settings, ClientRound(0, 1, 0))
    expected = train_locally(server.model, server.task, work)

    def decompose(_):
        raise AssertionError("a client decomposed a weight")

    monkeypatch.setattr(frlora, "svd", decompose)
    client = ModelAndData(config)
    found = train_locally(client.model, client.task, work)
    assert same_bits(found.upload, expected.upload)
    assert found.train_loss == expected.train_loss
    with pytest.raises(AssertionError, match="decomposed"):
        client.model.initial_state()
