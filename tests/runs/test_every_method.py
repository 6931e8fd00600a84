"""A run of each method, short and with small steps: it is as planned, and every round counts."""

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


def test_its_plan_is_what_it_does(run):
    method = run.summary["method"]
    settings = TINY | {"method": method}
    told = describe(read_config(settings))
    assert f"trained         {run.summary['trainable-parameters']:,} parameters" in told
    assert f"{run.summary['adapter-parameters']:,} of them beside the classifier" in told
    # At most: bytes of a run with the preset's 20 clients, of which this one has four.
    found = re.search(r"the run .*: at most ([\d,]+) bytes up, ([\d,]+) down", told)
    assert found is not None
    most = [int(number.replace(",", "")) for number in found.groups()]
    assert run.summary["bytes-up"] <= most[0]
    assert run.summary["bytes-down"] <= most[1]
    for client in records_of(run)[-1]["clients"]:
        assert f"{client['bytes-up']:,}" in told
        # At most: what these send grows to this.
        assert f"{client['bytes-down']:,}" in told or method in ("fedex-lora", "flora")
        in_turn = method in ("rolora", "feddpa")
        at_rest = run.summary["adapter-parameters"] // 2 if in_turn else 0
        assert step_memory(read_config(settings), 1.0).trained == 16 * (
            run.summary["trainable-parameters"] - at_rest
        )


def test_honest_rounds_have_an_effect_however_small_their_steps(run):
    """FlexLoRA's A has rows of norm one after a round, and smaller ones before it."""
    assert run.summary["without-effect"] == []
    assert run.summary["rejected"] == 0
    losses = [record["metrics"]["loss"] for record in records_of(run)[-2:]]
    assert losses[0] != losses[1]
