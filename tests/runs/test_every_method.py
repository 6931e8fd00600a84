"""Short runs of each method: the bytes of its plan, an effect in every round, a hostile client."""

import re

import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.methods import METHODS
from ravan_flwr.training.cost import step_memory
from ravan_flwr.training.plan import describe
from tests import short_runs
from tests.short_runs import SHORT, records_of

GROWING = ("fedex-lora", "flora", "fedmomentum", "frlora", "florist")
TINY = {"clients-per-round": 4, "local-steps": 1, "learning-rate": 1e-4}


@pytest.fixture(scope="module", params=METHODS)
def run(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    return short_runs.run(folder, 4, TINY, method=request.param)


@pytest.mark.slow(kept=3)
def test_a_run_matches_its_plan(run):
    method = run.summary["method"]
    settings = SHORT | TINY | {"method": method}
    plan = describe(read_config(settings))
    assert f"trained         {run.summary['trainable-parameters']:,} parameters" in plan
    assert f"{run.summary['adapter-parameters']:,} of them in the adapters" in plan
    # Upper limits: the plan is for the preset's 20 clients, this run has four.
    found = re.search(r"the run .*: at most ([\d,]+) bytes up, ([\d,]+) down", plan)
    assert found is not None
    for key, limit in zip(("bytes-up", "bytes-down"), found.groups(), strict=True):
        assert run.summary[key] <= int(limit.replace(",", ""))
    for client in records_of(run)[-1]["clients"]:
        assert f"{client['bytes-up']:,}" in plan
        # An upper limit for some methods, whose messages grow to it.
        assert f"{client['bytes-down']:,}" in plan or method in GROWING
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


class Attacking(InProcessGrid):
    """Nodes of which node 1 multiplies its uploads."""

    def _deliver(self, message):
        reply = super()._deliver(message)
        if message.metadata.dst_node_id == 1 and message.metadata.message_type == "train":
            tensors = from_record(reply.content.array_records["arrays"])
            multiplied = {k: v * 1e5 if v.is_floating_point() else v for k, v in tensors.items()}
            reply.content["arrays"] = to_record(multiplied)
        return reply


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize("method", METHODS)
def test_a_multiplied_reply_is_rejected_from_the_first_round(method, tmp_path, monkeypatch):
    monkeypatch.setattr("ravan_flwr.launch.in_process.InProcessGrid", Attacking)
    settings = {"method": method, "local-steps": 3, "clients-per-round": 4}
    if METHODS[method].pools:  # the round's only reply is rejected
        with pytest.raises(RuntimeError, match="round 1: got no valid reply, .*upload changes"):
            short_runs.run(tmp_path, 1, settings)
        return
    run = short_runs.run(tmp_path, 4, settings)
    # `local` has no uploads, and FedDPA none in the second half of its rounds.
    assert run.summary["rejected"] == {"local": 0, "feddpa": 1}.get(method, 2)
    assert run.summary["rounds"] == 2
    assert run.summary["metrics"]["final"]["loss"] < 3
