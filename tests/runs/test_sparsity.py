"""Runs with sparse messages: their bytes, and other settings with them."""

import json
from typing import Any

import pytest
import torch

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.training.cost import Skeleton

SHORT: dict[str, Any] = {
    "num-rounds": 2, "local-steps": 2, "batch-size": 8, "clients-per-round": 2, "processes": 1,
    "classifier": "trained", "tracking": "none", "report": False,
}  # fmt: skip


def run(tmp_path, clients=2, **settings):
    settings_by_key = {key.replace("_", "-"): value for key, value in settings.items()}
    return simulate(SHORT | settings_by_key | {"output-dir": str(tmp_path)}, clients)


def rounds(simulation):
    lines = (simulation.run_dir / "rounds.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["round"]]


def state_of(simulation, number=2):
    return load_checkpoint(simulation.run_dir / "checkpoints", number).state


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.sparse_down and m.sparse_up])
def test_a_runs_bytes_are_those_of_the_plan(name, tmp_path):
    simulation = run(tmp_path, method=name, sparsity="1/4:1/16")
    settings = {**SHORT, "method": name}
    sparse_costs = Skeleton(read_config(settings | {"sparsity": "1/4:1/16"}))
    records = rounds(simulation)
    for record in records:
        sends_nothing = name == "feddpa" and record["round"] == 2  # a round without uploads
        up = 0 if sends_nothing else sparse_costs.bytes_up(1.0)
        clients = record["clients"]
        assert [c["bytes-up"] for c in clients] == [up] * (1 if METHODS[name].pools else 2)
        assert record["rejected"] == []
        assert "refused" not in record
    down = [c["bytes-down"] for c in records[-1]["clients"]]
    assert all(number <= sparse_costs.bytes_down(1.0) for number in down)
    dense_costs = Skeleton(read_config(settings))
    if name != "local":  # a sixteenth of the numbers, with positions: below an eighth
        assert sparse_costs.bytes_up(1.0) < dense_costs.bytes_up(1.0) / 8
        assert sparse_costs.bytes_down(1.0) < dense_costs.bytes_down(1.0)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("name", ["ravan", "fedit", "flora", "fedsa-lora"])
def test_density_one_gives_the_bits_of_a_run_without_sparsity(name, tmp_path):
    first, second = run(tmp_path, method=name), run(tmp_path, method=name, sparsity="1.0:1")
    assert same(state_of(first), state_of(second))
    assert [r["bytes-up"] for r in rounds(first)] == [r["bytes-up"] for r in rounds(second)]


@pytest.mark.parametrize("sparsity", ["1:0.999999999", "0.999999999:1"])
def test_a_density_close_to_one_gives_nearly_the_same_state(sparsity, tmp_path):
    # The smallest number of each row is dropped. Two steps of Adam change a number by up to 0.006.
    state = state_of(run(tmp_path, num_rounds=1), 1)
    second = state_of(run(tmp_path, num_rounds=1, sparsity=sparsity), 1)
    assert not same(state, second)
    assert max(float((second[name] - state[name]).abs().max()) for name in state) < 0.003
    assert max(float(state[name].abs().max()) for name in state) > 0.003


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    "settings",
    [
        {"wire": "int8", "budgets": "skewed-right"},
        {"method": "hetlora", "budgets": "skewed-right"},
        {"method": "fed-plora", "budgets": "uniform", "server_optimizer": "momentum"},
        {"aggregation": "async", "concurrency": 3, "buffer_size": 2, "devices": "phones"},
        {"privacy": "client", "noise_multiplier": 1.0},
        {"privacy": "example", "noise_multiplier": 1.0, "classifier": "frozen"},
        {"evaluate_on": "clients"},
    ],
    ids=lambda settings: " ".join(map(str, settings.values())),
)
def test_sparsity_with_other_settings_resumes_to_the_same_bits(settings, tmp_path):
    settings = {"sparsity": "1/4:1/4", **settings}
    uninterrupted = run(tmp_path, 4, **settings)
    assert not any("refused" in record for record in rounds(uninterrupted))
    assert not any(record["rejected"] for record in rounds(uninterrupted))
    if settings.get("privacy") == "client":
        return  # a resumed run samples clients and noise again
    resumed = run(tmp_path, 4, resume=str(run(tmp_path, 4, **settings, num_rounds=1).run_dir),
                  **settings)  # fmt: skip
    assert settings.get("privacy") or same(state_of(uninterrupted), state_of(resumed))


@pytest.mark.slow
def test_simulated_time_and_max_bytes_count_sparse_bytes(tmp_path):
    times, num_rounds = {}, {}
    for sparsity in ("1:1", "1/16:1/16"):
        timed = run(tmp_path, devices="phones", sparsity=sparsity)
        times[sparsity] = rounds(timed)[-1]["time"]
        limited = run(tmp_path, num_rounds=3, sparsity=sparsity, max_bytes=200_000.0)
        num_rounds[sparsity] = len(rounds(limited))
    assert times["1/16:1/16"] < times["1:1"]
    assert num_rounds["1/16:1/16"] > num_rounds["1:1"]
