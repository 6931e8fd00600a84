"""Faulty and hostile nodes on Flower's deployment runtime with TLS and authentication.

Node 1 has another fault in every round of a run, then it uploads hostile objects. The run continues
with node 0 to its end. At the same time another run waits for an unresponsive node. Then both nodes
are honest: two runs share them, and a run is resumed after the SuperLink was killed. Both nodes
have warm workers.
"""

import json
import os
import re
from pathlib import Path

import pytest

from ravan_flwr import simulate
from ravan_flwr.specs import Scalar
from testing.deployment import ROUNDS_TIMEOUT, Deployment, wait_for
from tests import ROOT
from tests.flower import faulty_client

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

SHORT = "local-steps=5 clients-per-round=2 report=false tracking='none'"

# round -> (fault of node 1, reason of the rejection in the record)
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
# round -> (hostile object or value of node 1, pattern of the reason)
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
LAST_ROUND = len(FAULTS) + len(ATTACKS) + 1
STRAGGLER_TIMEOUT = 20.0  # seconds after the first reply
LONG_TIMEOUT = "round-timeout=3600.0"
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
    """Return the run of all faults and attacks, and the run with an unresponsive node."""
    folder = deployment.folder / "faulty"
    faulty_client.write(folder, PLAN)
    start_nodes(deployment, faulty=True)
    unresponsive_run = deployment.run(
        f"seed=1 num-rounds=2 {LONG_TIMEOUT} straggler-grace={STRAGGLER_TIMEOUT} {SHORT}"
    )
    no_straggler_timeout = f"{LONG_TIMEOUT} straggler-grace=3600.0"
    run = deployment.run(
        f"num-rounds={LAST_ROUND} limits='max-update-norm=100.0' {no_straggler_timeout} {SHORT}"
    )
    wait_for(
        lambda: len(unresponsive_run.rounds) >= 1,
        "the unresponsive node's round to be closed",
        ROUNDS_TIMEOUT,
    )
    (folder / "closed").touch()
    assert [each.wait() for each in (run, unresponsive_run)] == ["finished:completed"] * 2
    stop_nodes(deployment)
    return run, unresponsive_run


def records_of(run):
    return {record["round"]: record for record in run.rounds}


def rejection_reason(record):
    """Return the reason of the rejection of node 1's reply; node 0's is used."""
    assert [c["partition-id"] for c in record["clients"]] == [0], record["round"]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 1"
    return rejected["reason"]


def test_an_invalid_reply_is_rejected_in_its_round_only(faulty_runs):
    run, _ = faulty_runs
    records = records_of(run)
    assert len(records) == LAST_ROUND
    for number, (_, reason) in FAULTS.items():
        assert reason in rejection_reason(records[number]), number
    assert [c["partition-id"] for c in records[LAST_ROUND]["clients"]] == [0, 1]
    assert records[LAST_ROUND]["rejected"] == []
    assert records[LAST_ROUND]["metrics"]["accuracy"] > 0.5


def test_hostile_objects_are_rejected_in_their_round_only(faulty_runs):
    run, _ = faulty_runs
    records = records_of(run)
    for number, (_, reason) in ATTACKS.items():
        rejection = rejection_reason(records[number])
        assert re.search(reason, rejection), (number, rejection)
        assert len(rejection) <= 500
    assert "\x1b[2K" not in run.log
    assert not re.search(r"^.?round 9/9  loss 0.0000", run.log, re.MULTILINE)


def test_an_unresponsive_node_misses_its_round_and_its_late_reply_is_recorded(faulty_runs):
    _, run = faulty_runs
    first, second = run.rounds
    (seconds,) = re.findall(r"^no reply within (\S+) s", rejection_reason(first))
    assert float(seconds) >= STRAGGLER_TIMEOUT
    assert [c["partition-id"] for c in second["clients"]] == [0, 1]
    (late,) = second["rejected"]
    assert late["reason"].startswith(f"late: a reply to round 1, which closed after {seconds} s")


@pytest.fixture(scope="module")
def honest_deployment(deployment, faulty_runs):
    """Restart the same nodes without faults."""
    start_nodes(deployment, faulty=False)
    return deployment


def test_two_runs_at_once_are_independent(honest_deployment):
    runs = [
        honest_deployment.run(f"method='{m}' budgets='full' num-rounds=2 {SHORT}")
        for m in ("ravan", "flexlora")
    ]
    for run, method in zip(runs, ("ravan", "flexlora"), strict=True):
        assert run.wait() == "finished:completed"
        summary = json.loads((run.directory / "summary.json").read_text())
        assert (summary["method"], summary["rounds"], summary["rejected"]) == (method, 2, 0)
        for record in run.rounds:
            assert [c["partition-id"] for c in record["clients"]] == [0, 1]


def test_a_run_resumes_to_the_same_bits_after_the_superlink_was_killed(honest_deployment):
    deployment = honest_deployment
    settings = f"num-rounds=4 {SHORT}"
    run = deployment.run(settings)
    wait_for(lambda: len(run.rounds) >= 2, "two rounds", ROUNDS_TIMEOUT)
    deployment.kill_superlink()
    stopped_at = len(run.rounds)
    run.abandon()
    deployment.start_superlink()
    resumed = deployment.run(f"{settings} resume='{run.directory}'")
    assert resumed.wait() == "finished:completed"
    assert f"resuming after round {stopped_at}" in resumed.log
    assert [record["round"] for record in run.rounds] == [1, 2, 3, 4]
    assert all(record["rejected"] == [] for record in run.rounds)

    # The same bits as an uninterrupted run in one process.
    honest_settings: dict[str, Scalar] = {
        "num-rounds": 4, "local-steps": 5, "clients-per-round": 2, "report": False,
        "tracking": "none",
    }  # fmt: skip
    uninterrupted = simulate(
        honest_settings | {"output-dir": str(deployment.folder / "one-process")}, 2
    ).run_dir
    expected = uninterrupted / "adapter" / "adapter_model.safetensors"
    actual = run.directory / "adapter" / "adapter_model.safetensors"
    assert actual.read_bytes() == expected.read_bytes()


def stop_nodes(deployment):
    for number in range(2):
        deployment.stop_node(number)
