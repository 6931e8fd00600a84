"""A short run of each method with small steps matches its plan, and every round has an effect."""

import json
import re

import pytest

from ravan_flwr import simulate
from ravan_flwr.config.run_config import read_config
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import Scalar
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.plan import describe

TINY: dict[str, Scalar] = {
    "num-rounds": 2, "clients-per-round": 4, "local-steps": 1, "batch-size": 8, "report": False,
    "tracking": "none", "learning-rate": 1e-4,
}  # fmt: skip


@pytest.fixture(scope="module", params=METHODS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return simulate(TINY | {"method": request.param, "output-dir": str(folder)}, 4)


def records_of(run):
    return [json.loads(line) for line in (run.run_dir / "rounds.jsonl").read_text().splitlines()]


@pytest.mark.slow(kept=3)
def test_a_run_matches_its_plan(run):
    method = run.summary["method"]
    settings = TINY | {"method": method}
    plan = describe(read_config(settings))
    assert f"trained         {run.summary['trainable-parameters']:,} parameters" in plan
    assert f"{run.summary['adapter-parameters']:,} of them in the adapters" in plan
    # Upper limits: the plan is for the preset's 20 clients, this run has four.
    found = re.search(r"the run .*: at most ([\d,]+) bytes up, ([\d,]+) down", plan)
    assert found is not None
    limits = [int(number.replace(",", "")) for number in found.groups()]
    assert run.summary["bytes-up"] <= limits[0]
    assert run.summary["bytes-down"] <= limits[1]
    for client in records_of(run)[-1]["clients"]:
        assert f"{client['bytes-up']:,}" in plan
        # An upper limit for two methods, whose messages grow to it.
        assert f"{client['bytes-down']:,}" in plan or method in ("fedex-lora", "flora")
        alternates = method in ("rolora", "feddpa")
        not_trained = run.summary["adapter-parameters"] // 2 if alternates else 0
        assert step_memory(read_config(settings), 1.0).trained == 16 * (
            run.summary["trainable-parameters"] - not_trained
        )


def test_honest_rounds_with_small_steps_have_an_effect(run):
    """FlexLoRA's A has rows of norm one after a round, and smaller rows before it."""
    assert run.summary["without-effect"] == []
    assert run.summary["rejected"] == 0
    losses = [record["metrics"]["loss"] for record in records_of(run)[-2:]]
    assert losses[0] != losses[1]
