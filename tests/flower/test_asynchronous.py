"""Asynchronous rounds in a deployment of three SuperNodes with warm workers.

Node 2 is limited to 10 % of the CPU once the nodes are registered. Node 1
sends each reply twice, and is killed in the last run.
"""

import json
import os
import re
import signal
from pathlib import Path

import pytest

from ravan_flwr import simulate
from ravan_flwr.launch.superlink import processes_of
from ravan_flwr.runs.checkpoint import load_checkpoint
from ravan_flwr.specs import Scalar
from testing.deployment import (
    ROUNDS_TIMEOUT,
    Deployment,
    _command_line,
    wait_for,
    with_fork,
)
from tests import ROOT
from tests.flower import doubling_node
from tests.flower.slowed import frozen, send, slowed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
]

SLOW, DOUBLING = 2, 1
SETTINGS = "clients-per-round=3 eval-every=1000 report=false tracking='none'"
ASYNC = f"aggregation='async' concurrency=3 {SETTINGS}"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("asynchronous")
    with Deployment(folder, nodes=3, scripts=python.scripts) as running:
        doubling_node.write(folder / "doubling")
        for number in range(3):
            running.register(number)
            paths = [str(folder / "doubling")] * (number == DOUBLING) + [str(ROOT)]
            running.start_node(
                number, f"partition-id={number} num-partitions=3 warm-worker=true",
                PYTHONPATH=os.pathsep.join(paths),
            )  # fmt: skip
        assert [running.wait_for_node(number) for number in range(3)] == [True] * 3
        yield running
    assert running.left_running == []


def start_run(deployment, settings):
    run = deployment.run(settings)
    wait_for(lambda: "3 nodes with" in run.log, "the nodes to be registered")
    return run


def updates_of(run):
    """Return each update as (partition, version it started from, round that used it, span)."""
    return [
        (c["partition-id"], r["round"] - c.get("staleness", 0), r["round"], c["span"])
        for r in run.rounds
        for c in r["clients"]
    ]


def kill_serverapp(deployment, run):
    """Kill the process of the ServerApp; return the last round with a checkpoint.

    The round log may have one more round.
    """
    pids = [
        pid
        for pid in processes_of(deployment.folder / "superlink")
        if "flwr-serverapp" in _command_line(pid)
    ]
    assert pids
    send([process for pid in pids for process in with_fork(pid)], signal.SIGKILL)
    run.abandon()
    return load_checkpoint(run.directory / "checkpoints").round


def test_a_slow_node_does_not_delay_the_others(deployment):
    home = deployment.folder / f"node-{SLOW}"
    synchronous = start_run(deployment, f"num-rounds=1 local-steps=30 {SETTINGS}")
    with slowed(home):
        assert synchronous.wait() == "finished:completed"
    asynchronous = start_run(deployment, f"num-rounds=3 local-steps=30 buffer-size=2 {ASYNC}")
    with frozen(home):
        wait_for(lambda: len(asynchronous.rounds) >= 2, "two versions meanwhile", ROUNDS_TIMEOUT)
    assert asynchronous.wait() == "finished:completed"
    assert [partition for partition, *_ in updates_of(synchronous)] == [0, 1, 2]
    assert [len(record["clients"]) for record in asynchronous.rounds] == [2] * 3


def late_updates(rounds):
    """Return the rejections of node 2: on a busy machine other nodes may be late as well."""
    rejected = [rejection for record in rounds for rejection in record["rejected"]]
    return [rejection for rejection in rejected if rejection["client"] == f"partition {SLOW}"]


@pytest.fixture(scope="module")
def interrupted_runs(deployment):
    """Return a run with a late node 2 and a killed ServerApp, the resumed run, and the last round.

    Node 1 is killed during the resumed run.
    """
    settings = f"local-steps=5 buffer-size=1 max-staleness=2 {ASYNC}"
    run = start_run(deployment, f"num-rounds=500 {settings}")
    wait_for(lambda: len(run.rounds) >= 1, "a first version", ROUNDS_TIMEOUT)
    with frozen(deployment.folder / f"node-{SLOW}"):
        target = len(run.rounds) + 3  # node 2 has the next version at most
        wait_for(lambda: len(run.rounds) >= target, "versions without node 2", ROUNDS_TIMEOUT)
    wait_for(
        lambda: late_updates(run.rounds[:-1]),
        "the late update, and a checkpoint of it",
        ROUNDS_TIMEOUT,
    )
    stopped_at = kill_serverapp(deployment, run)
    resumed = start_run(
        deployment, f"num-rounds={stopped_at + 5} {settings} resume='{run.directory}'"
    )
    wait_for(
        lambda: len(run.rounds) > stopped_at,
        "a version of the run that was resumed",
        ROUNDS_TIMEOUT,
    )
    deployment.kill_node(DOUBLING)
    assert resumed.wait() == "finished:completed"
    return run, resumed, stopped_at


def test_a_late_update_is_rejected(interrupted_runs):
    run, _, stopped_at = interrupted_runs
    rejected = late_updates(run.rounds[:stopped_at])
    assert re.fullmatch(
        r"its update is \d+ versions old, expected at most max-staleness = 2",
        rejected[0]["reason"],
    )
    assert max(c.get("staleness", 0) for r in run.rounds for c in r["clients"]) in (1, 2)


def test_a_duplicate_update_counts_once(deployment, interrupted_runs):
    assert deployment.log("superlink").count("duplicate reply for") >= 2
    run, _, stopped_at = interrupted_runs
    of_node = [
        update for update in updates_of(run) if update[0] == DOUBLING and update[2] <= stopped_at
    ]
    assert len(of_node) == len({version for _, version, *_ in of_node}) >= 1


def test_a_resumed_run_counts_no_update_twice(interrupted_runs):
    run, resumed, stopped_at = interrupted_runs
    assert f"resuming after round {stopped_at}" in resumed.log
    assert [record["round"] for record in run.rounds] == list(range(1, stopped_at + 6))
    assert [len(record["clients"]) for record in run.rounds] == [1] * (stopped_at + 5)
    counted = [(partition, version) for partition, version, *_ in updates_of(run)]
    assert len(counted) == len(set(counted))
    times = [record["time"] for record in run.rounds]
    assert times == sorted(times)


def test_a_killed_node_loses_only_its_own_updates(interrupted_runs):
    run, _, stopped_at = interrupted_runs
    later = run.rounds[stopped_at + 1 :]
    for reply in (reply for record in later for reply in record["rejected"]):
        # On a busy machine the others may be late.
        assert reply["client"] == f"partition {DOUBLING}" or "versions old" in reply["reason"]
    assert {c["partition-id"] for r in later for c in r["clients"]} & {0, SLOW}


def test_round_records_have_the_fields_of_a_simulation(interrupted_runs, tmp_path):
    run, _, _ = interrupted_runs
    settings: dict[str, Scalar] = {
        "aggregation": "async", "buffer-size": 1, "concurrency": 3, "devices": "edge-gpus",
        "clients-per-round": 3, "num-rounds": 6, "local-steps": 1, "eval-every": 1000,
        "report": False, "tracking": "none", "output-dir": str(tmp_path),
    }  # fmt: skip
    simulated = simulate(settings, 3).run_dir / "rounds.jsonl"
    expected = [json.loads(line) for line in simulated.read_text().splitlines()]

    def fields(rounds):
        clients = [client for record in rounds for client in record["clients"]]
        return [set().union(*records) for records in (rounds, clients)]

    (run_round, run_client), (expected_round, expected_client) = (
        fields(run.rounds),
        fields(expected),
    )
    assert run_round - {"link-bytes-estimate"} == expected_round - {"collapsed"}
    assert run_client == expected_client - {"device"}
    for _, _, number, (began, ended) in updates_of(run):
        assert 0 <= began < ended <= run.rounds[number - 1]["time"]
