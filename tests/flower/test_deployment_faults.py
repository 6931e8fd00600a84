"""What happens to real fleets, on Flower's deployment runtime with TLS and authentication.

Node 1 is faulty in every round of a run in another way, then hostile: it uploads what is no reply.
The run goes on with node 0, to its end. Beside it another run waits for a node that is silent.
Then the nodes are as they should be: two runs share them, and the SuperLink is killed and the run
is gone on with. Both nodes have warm workers.
"""

import json
import os
import re
from pathlib import Path

import pytest

from ravan_flwr import simulate
from ravan_flwr.specs import Scalar
from testing.deployment import Deployment, wait_for
from tests import ROOT
from tests.flower import faulty_client

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

SHORT = "local-steps=5 clients-per-round=2 report=false tracking='none'"

# What node 1 does in each round, and what the record says about it.
FAULTS = {
    1: ("raises", "it failed with code 2: <class 'ZeroDivisionError'>:<'on fire'>"),
    2: ("nan", "H has values that are not finite"),
    3: ("infinity", "H has values that are not finite"),
    4: ("shape", "H is torch.float32 (16, 13, 12), expected torch.float32 (16, 13, 13)"),
    5: ("dtype", "array 'H' is of dtype 'float64', expected one of float32"),
    6: ("index", "heads marks [1, 2, 2, 2, 2, 2, 2, 2] heads by layer, expected 2 in each"),
    7: ("round", "reply is of round 99, expected 7"),
    8: ("heads", "heads marks [4, 4, 4, 4, 4, 4, 4, 4] heads by layer, expected 2 in each"),
    9: ("norm", "max-update-norm"),
    10: ("bytes", "array 'H' has 10815 bytes, expected 10816"),
    11: ("nothing", "missing 'metrics'"),
}
# The same as patterns: what it uploads in place of a reply's objects, and what it says in them.
ATTACKS = {
    12: ("question", "its reply cannot be read: ValueError: it answers message 'of my own making'"),
    13: ("array-dtype", "its reply cannot be read: TypeError: Invalid arguments for Array"),
    14: ("sides", "has 10000 dimensions, expected 8 at most"),
    15: ("chunks", "its reply cannot be read: ValueError: its tensors are .* bytes from few"),
    16: ("root", "its reply cannot be read: AttributeError: 'RecordDict' object"),
    17: ("short", "its reply cannot be read: IndexError"),
    18: ("escape", r"x1b\[2K.*round 9/9"),
    19: ("loss", r"train-loss is 1.7e\+308, expected"),
}
LAST = len(FAULTS) + len(ATTACKS) + 1
GRACE = 20.0  # seconds after the first reply, which may take as long as the machine needs
PATIENT = "round-timeout=3600.0"
PLAN = {
    0: {1: {2: "after the other"}},
    1: {
        0: {number: kind for number, (kind, _) in (FAULTS | ATTACKS).items()},
        1: {1: "silent", 2: "after silence"},
    },
}


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("faults")
    with Deployment(folder, nodes=2, scripts=python.scripts) as running:
        for number in range(2):
            running.register(number)
        yield running
    assert running.left_running == []


def start_nodes(deployment, *, faulty):
    for number in range(2):
        paths = [str(deployment.folder / "faulty"), str(ROOT)] if faulty else [str(ROOT)]
        deployment.start_node(
            number,
            f"partition-id={number} num-partitions=2 warm-worker=true{' budget=0.5' * faulty}",
            PYTHONPATH=os.pathsep.join(paths),
        )
    assert [deployment.wait_for_node(number) for number in range(2)] == [True, True]


@pytest.fixture(scope="module")
def faulty_runs(deployment):
    """The run of all faults and attacks, and beside it the run with a silent node."""
    folder = deployment.folder / "faulty"
    faulty_client.write(folder, PLAN)
    start_nodes(deployment, faulty=True)
    silent = deployment.run(f"seed=1 num-rounds=2 {PATIENT} straggler-grace={GRACE} {SHORT}")
    patient = f"{PATIENT} straggler-grace=3600.0"
    run = deployment.run(f"num-rounds={LAST} limits='max-update-norm=100.0' {patient} {SHORT}")
    wait_for(lambda: len(silent.rounds) >= 1, "the silent node's round to be closed")
    (folder / "closed").touch()
    assert [one.wait() for one in (run, silent)] == ["finished:completed"] * 2
    stop_nodes(deployment)
    return run, silent


def records_of(run):
    return {record["round"]: record for record in run.rounds}


def rejected_in(record):
    """Why node 1's reply to the round is not used, where node 0's is."""
    assert [c["partition-id"] for c in record["clients"]] == [0], record["round"]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 1"
    return rejected["reason"]


def test_a_reply_that_is_no_good_costs_its_round_and_nothing_else(faulty_runs):
    run, _ = faulty_runs
    records = records_of(run)
    assert len(records) == LAST
    for number, (_, reason) in FAULTS.items():
        assert reason in rejected_in(records[number]), number
    assert [c["partition-id"] for c in records[LAST]["clients"]] == [0, 1]
    assert records[LAST]["rejected"] == []
    assert records[LAST]["metrics"]["accuracy"] > 0.5


def test_hostile_objects_cost_their_round_and_nothing_else(faulty_runs):
    run, _ = faulty_runs
    records = records_of(run)
    for number, (_, reason) in ATTACKS.items():
        told = rejected_in(records[number])
        assert re.search(reason, told), (number, told)
        assert len(told) <= 500
    assert "\x1b[2K" not in run.log
    assert not re.search(r"^.?round 9/9  loss 0.0000", run.log, re.MULTILINE)


def test_silence_costs_its_round_and_a_late_reply_is_told(faulty_runs):
    _, run = faulty_runs
    first, second = run.rounds
    (seconds,) = re.findall(r"^no reply within (\S+) s", rejected_in(first))
    assert float(seconds) >= GRACE
    assert [c["partition-id"] for c in second["clients"]] == [0, 1]
    (late,) = second["rejected"]
    assert late["reason"].startswith(f"late: a reply to round 1, which closed after {seconds} s")


@pytest.fixture(scope="module")
def honest(deployment, faulty_runs):
    """The same nodes, which now do as they should."""
    start_nodes(deployment, faulty=False)
    return deployment


def test_two_runs_at_once_do_not_meet(honest):
    runs = [
        honest.run(f"method='{m}' budgets='full' num-rounds=2 {SHORT}")
        for m in ("ravan", "flexlora")
    ]
    for run, method in zip(runs, ("ravan", "flexlora"), strict=True):
        assert run.wait() == "finished:completed"
        summary = json.loads((run.directory / "summary.json").read_text())
        assert (summary["method"], summary["rounds"], summary["rejected"]) == (method, 2, 0)
        for record in run.rounds:
            assert [c["partition-id"] for c in record["clients"]] == [0, 1]


def test_a_run_goes_on_after_the_superlink_was_killed(honest):
    deployment = honest
    settings = f"num-rounds=4 {SHORT}"
    run = deployment.run(settings)
    wait_for(lambda: len(run.rounds) >= 2, "two rounds")
    deployment.kill_superlink()
    done = len(run.rounds)
    run.abandon()
    deployment.start_superlink()
    again = deployment.run(f"{settings} resume='{run.directory}'")
    assert again.wait() == "finished:completed"
    assert f"resuming after round {done}" in again.log
    assert [record["round"] for record in run.rounds] == [1, 2, 3, 4]
    assert all(record["rejected"] == [] for record in run.rounds)

    # The same bits as in one process that nothing happened to.
    given: dict[str, Scalar] = {
        "num-rounds": 4, "local-steps": 5, "clients-per-round": 2, "report": False,
        "tracking": "none",
    }  # fmt: skip
    whole = simulate(given | {"output-dir": str(deployment.folder / "one-process")}, 2).run_dir
    expected = whole / "adapter" / "adapter_model.safetensors"
    got = run.directory / "adapter" / "adapter_model.safetensors"
    assert got.read_bytes() == expected.read_bytes()


def stop_nodes(deployment):
    for number in range(2):
        deployment.stop_node(number)
