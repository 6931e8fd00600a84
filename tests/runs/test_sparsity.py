"""Runs with sparse or rounded messages: their bytes, and other settings with them."""

import functools
from typing import Any

import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.training.cost import Skeleton
from tests import short_runs
from tests.short_runs import SHORT, records_of, same_bits, saved, state_of

TRAINED = {"clients-per-round": 2, "processes": 1, "classifier": "trained"}
SPARSE = {"sparsity": "1/4:1/16"}
run = functools.partial(short_runs.run, clients=2, settings=TRAINED)


def rounds(simulation):
    return [record for record in records_of(simulation) if record["round"]]


@pytest.mark.slow(kept=6)
@pytest.mark.parametrize(
    ("name", "setting"),
    [
        *((name, SPARSE) for name, m in METHODS.items() if m.sparse_down and m.sparse_up),
        *((name, {"wire": "int8"}) for name in METHODS),
        *(("ravan", {"wire": wire}) for wire in ("float16", "bfloat16")),
    ],
)
def test_a_runs_bytes_are_those_of_the_plan(name, setting, tmp_path):
    records = rounds(run(tmp_path, method=name, **setting))
    settings: dict[str, Any] = SHORT | TRAINED | {"method": name}
    costs = Skeleton(read_config(settings | setting))
    plain = Skeleton(read_config(settings))
    for record in records:
        sends_nothing = name == "feddpa" and record["round"] == 2  # a round without uploads
        up = 0 if sends_nothing else costs.bytes_up(1.0)
        clients = record["clients"]
        assert [c["bytes-up"] for c in clients] == [up] * (1 if METHODS[name].pools else 2)
        assert record["rejected"] == []
        assert "refused" not in record
        if name != "fed-sb" or record["round"] > 1:  # whose first message has the bases as well
            assert all(c["bytes-down"] <= costs.bytes_down(1.0) for c in clients)
    if setting == SPARSE and name != "local":
        # A sixteenth of the numbers, with positions: below an eighth.
        assert costs.bytes_up(1.0) < plain.bytes_up(1.0) / 8
        assert costs.bytes_down(1.0) < plain.bytes_down(1.0)
    if setting != SPARSE:
        ratio = {"int8": 1 / 4, "float16": 1 / 2, "bfloat16": 1 / 2}[setting["wire"]]
        assert costs.bytes_up(1.0) == pytest.approx(ratio * plain.bytes_up(1.0), rel=0.04)


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("name", ["ravan", "fedit", "flora", "fedsa-lora"])
def test_density_one_gives_the_bits_of_a_run_without_sparsity(name, tmp_path):
    first, second = run(tmp_path, method=name), run(tmp_path, method=name, sparsity="1.0:1")
    assert same_bits(saved(first), saved(second))
    assert [r["bytes-up"] for r in rounds(first)] == [r["bytes-up"] for r in rounds(second)]


@pytest.mark.parametrize("sparsity", ["1:0.999999999", "0.999999999:1"])
def test_a_density_close_to_one_gives_nearly_the_same_state(sparsity, tmp_path):
    # The smallest number of each row is dropped. Two steps of Adam change a number by up to 0.006.
    state = state_of(run(tmp_path, num_rounds=1), 1)
    second = state_of(run(tmp_path, num_rounds=1, sparsity=sparsity), 1)
    assert not same_bits(state, second)
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
    settings = {"sparsity": "1/4:1/4", "clients": 4, **settings}
    uninterrupted = run(tmp_path, **settings)
    assert not any("refused" in record or record["rejected"] for record in rounds(uninterrupted))
    if settings.get("privacy") == "client":
        return  # a resumed run samples clients and noise again
    stopped = run(tmp_path, **settings, num_rounds=1)
    resumed = run(tmp_path, resume=str(stopped.run_dir), **settings)
    assert settings.get("privacy") or same_bits(saved(uninterrupted), saved(resumed))


@pytest.mark.parametrize("method", ["fedit", "fedex-lora"])
def test_bits_of_int8_are_drawn_alike_after_a_resume(method, tmp_path):
    """A checkpoint has the tensors of the state in the order of their names."""
    uninterrupted = run(tmp_path, method=method, wire="int8")
    stopped = run(tmp_path, method=method, wire="int8", num_rounds=1)
    resumed = run(tmp_path, method=method, wire="int8", resume=str(stopped.run_dir))
    assert same_bits(saved(uninterrupted), saved(resumed))


@pytest.mark.slow
def test_simulated_time_and_max_bytes_count_sparse_bytes(tmp_path):
    times, num_rounds = [], []
    for sparsity in ("1/16:1/16", "1:1"):
        times.append(rounds(run(tmp_path, devices="phones", sparsity=sparsity))[-1]["time"])
        limited = run(tmp_path, num_rounds=3, sparsity=sparsity, max_bytes=200_000.0)
        num_rounds.append(len(rounds(limited)))
    assert times[0] < times[1]
    assert num_rounds[0] > num_rounds[1]
