"""Runs that send the largest numbers alone: what they weigh, and what they go together with."""

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
    named = {key.replace("_", "-"): value for key, value in settings.items()}
    return simulate(SHORT | named | {"output-dir": str(tmp_path)}, clients)


def rounds(done):
    lines = (done.run_dir / "rounds.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["round"]]


def state_of(done, number=2):
    return load_checkpoint(done.run_dir / "checkpoints", number).state


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


@pytest.mark.parametrize("name", [n for n, m in METHODS.items() if m.sparse_down and m.sparse_up])
def test_a_runs_bytes_are_those_of_the_plan(name, tmp_path):
    done = run(tmp_path, method=name, sparsity="1/4:1/16")
    settings = {**SHORT, "method": name}
    built = Skeleton(read_config(settings | {"sparsity": "1/4:1/16"}))
    records = rounds(done)
    for record in records:
        own = name == "feddpa" and record["round"] == 2  # a round that sends nothing
        up = 0 if own else built.bytes_up(1.0)
        clients = record["clients"]
        assert [c["bytes-up"] for c in clients] == [up] * (1 if METHODS[name].pools else 2)
        assert record["rejected"] == []
        assert "refused" not in record
    down = [c["bytes-down"] for c in records[-1]["clients"]]
    assert all(number <= built.bytes_down(1.0) for number in down)
    whole = Skeleton(read_config(settings))
    if name != "local":  # a sixteenth of the numbers, with their places: below an eighth
        assert built.bytes_up(1.0) < whole.bytes_up(1.0) / 8
        assert built.bytes_down(1.0) < whole.bytes_down(1.0)


@pytest.mark.parametrize("name", ["ravan", "fedit", "flora", "fedsa-lora"])
def test_all_numbers_give_the_bits_that_no_key_gives(name, tmp_path):
    one, other = run(tmp_path, method=name), run(tmp_path, method=name, sparsity="1.0:1")
    assert same(state_of(one), state_of(other))
    assert [r["bytes-up"] for r in rounds(one)] == [r["bytes-up"] for r in rounds(other)]


@pytest.mark.parametrize("sparsity", ["1:0.999999999", "0.999999999:1"])
def test_nearly_all_numbers_give_nearly_the_same(sparsity, tmp_path):
    # The smallest number of each row is left out. Two steps of Adam move a number by 0.006 at most.
    state = state_of(run(tmp_path, num_rounds=1), 1)
    other = state_of(run(tmp_path, num_rounds=1, sparsity=sparsity), 1)
    assert not same(state, other)
    assert max(float((other[name] - state[name]).abs().max()) for name in state) < 0.003
    assert max(float(state[name].abs().max()) for name in state) > 0.003


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
def test_what_it_goes_together_with_resumes_to_the_same_bits(settings, tmp_path):
    settings = {"sparsity": "1/4:1/4", **settings}
    whole = run(tmp_path, 4, **settings)
    assert not any("refused" in record for record in rounds(whole))
    assert not any(record["rejected"] for record in rounds(whole))
    if settings.get("privacy") == "client":
        return  # who trains, and the noise, are drawn anew
    resumed = run(tmp_path, 4, resume=str(run(tmp_path, 4, **settings, num_rounds=1).run_dir),
                  **settings)  # fmt: skip
    assert settings.get("privacy") or same(state_of(whole), state_of(resumed))


def test_simulated_time_and_a_budget_of_bytes_count_what_travels(tmp_path):
    times, done = {}, {}
    for sparsity in ("1:1", "1/16:1/16"):
        timed = run(tmp_path, devices="phones", sparsity=sparsity)
        times[sparsity] = rounds(timed)[-1]["time"]
        limited = run(tmp_path, num_rounds=3, sparsity=sparsity, max_bytes=200_000.0)
        done[sparsity] = len(rounds(limited))
    assert times["1/16:1/16"] < times["1:1"]
    assert done["1/16:1/16"] > done["1:1"]
