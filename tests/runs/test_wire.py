"""The bytes of a run's messages agree with its plan, for every `wire`."""

import json

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.training.cost import Skeleton


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(
    ("method", "wire"),
    [*((name, "int8") for name in METHODS), ("ravan", "float16"), ("ravan", "bfloat16")],
)
def test_a_runs_bytes_are_those_of_the_plan(method, wire, tmp_path):
    settings = {
        "method": method, "wire": wire, "num-rounds": 2, "local-steps": 2, "batch-size": 8,
        "clients-per-round": 2, "classifier": "trained", "tracking": "none", "report": False,
    }  # fmt: skip
    run = simulate(settings | {"output-dir": str(tmp_path)}, 2)
    costs = Skeleton(read_config(settings))
    lines = (run.run_dir / "rounds.jsonl").read_text().splitlines()
    records = [r for r in map(json.loads, lines) if r["round"]]
    for record in records:
        sizes = [c["bytes-up"] for c in record["clients"]]
        no_uploads = method == "feddpa" and record["round"] == 2  # a round without uploads
        up = 0 if no_uploads else costs.bytes_up(1.0)
        assert sizes == [up] * (1 if METHODS[method].pools else 2)
        assert record["rejected"] == []
    sends_bases = {"fed-sb"}  # the first message has the bases as well
    down = [c["bytes-down"] for c in records[method in sends_bases]["clients"]]
    assert all(bytes_down <= costs.bytes_down(1.0) for bytes_down in down)
    costs_in_float32 = Skeleton(read_config(settings | {"wire": "float32"}))
    ratio = {"int8": 1 / 4, "float16": 1 / 2, "bfloat16": 1 / 2}[wire]
    assert costs.bytes_up(1.0) == pytest.approx(ratio * costs_in_float32.bytes_up(1.0), rel=0.04)
