"""Asynchronous rounds in a deployment of three SuperNodes with warm workers.

Node 2 has a tenth of a processor once the nodes are registered: their start is not measured. Node 1
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
from testing.deployment import Deployment, _command_line, wait_for, with_fork
from tests import ROOT
from tests.flower import doubling_node
from tests.flower.slowed import frozen, send, slowed

pytestmark = pytest.mark.skipif(
    not Path("/proc/self/environ").exists(), reason="finds processes in /proc"
)

SLOW, DOUBLES = 2, 1
SETTINGS = "clients-per-round=3 eval-every=1000 report=false tracking='none'"
ASYNC = f"aggregation='async' concurrency=3 {SETTINGS}"


@pytest.fixture(scope="module")
def deployment(tmp_path_factory, python):
    folder = tmp_path_factory.mktemp("asynchronous")
    with Deployment(folder, nodes=3, scripts=python.scripts) as running:
        doubling_node.write(folder / "doubling")
        for number in range(3):
            running.register(number)
            paths = [str(folder / "doubling")] * (number == DOUBLES) + [str(ROOT)]
            running.start_node(
                number, f"partition-id={number} num-partitions=3 warm-worker=true",
                PYTHONPATH=os.pathsep.join(paths),
            )  # fmt: skip
        assert [running.wait_for_node(number) for number in range(3)] == [True] * 3
        yield running
    assert running.left_running == []


def begun(deployment, settings):
    run = deployment.run(settings)
    wait_for(lambda: "3 nodes with" in run.log, "the nodes to be registered")
    return run


def updates_of(run):
    """Each update as (partition, version that it was sent, round in which it counted, span)."""
    return [
        (c["partition-id"], r["round"] - c.get("staleness", 0), r["round"], c["span"])
        for r in run.rounds
        for c in r["clients"]
    ]


def per_hour(run):
    """Updates an hour, from the first message on."""
    updates = updates_of(run)
    return 3600 * len(updates) / (run.rounds[-1]["time"] - min(span[0] for *_, span in updates))


def kill_serverapp(deployment, run):
    """Let the process of the ServerApp die, before the SuperLink sees it; return its last round.

    That is the last with a checkpoint: the line of a further one may be written.
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


def test_a_slow_node_does_not_hold_the_others_up(deployment):
    home = deployment.folder / f"node-{SLOW}"
    sync = begun(deployment, f"num-rounds=1 local-steps=30 {SETTINGS}")
    with slowed(home):
        assert sync.wait() == "finished:completed"
    free = begun(deployment, f"num-rounds=3 local-steps=30 buffer-size=2 {ASYNC}")
    with slowed(home):
        assert free.wait() == "finished:completed"
    assert [partition for partition, *_ in updates_of(sync)] == [0, 1, 2]
    assert [len(record["clients"]) for record in free.rounds] == [2] * 3
    assert per_hour(free) >= 2 * per_hour(sync)


def late_updates(rounds):
    """List the rejections of node 2: on a busy machine another may be late as well."""
    rejected = [one for record in rounds for one in record["rejected"]]
    return [one for one in rejected if one["client"] == f"partition {SLOW}"]


@pytest.fixture(scope="module")
def interrupted(deployment):
    """A run in which node 2 is late, the ServerApp is killed, and then node 1; and its rounds."""
    settings = f"local-steps=5 buffer-size=1 max-staleness=2 {ASYNC}"
    run = begun(deployment, f"num-rounds=500 {settings}")
    wait_for(lambda: len(run.rounds) >= 1, "a first version")
    with frozen(deployment.folder / f"node-{SLOW}"):
        most = len(run.rounds) + 3  # it was sent the next version at most
        wait_for(lambda: len(run.rounds) >= most, "versions without node 2")
    wait_for(lambda: late_updates(run.rounds[:-1]), "the late update, and a checkpoint of it")
    done = kill_serverapp(deployment, run)
    again = begun(deployment, f"num-rounds={done + 5} {settings} resume='{run.directory}'")
    wait_for(lambda: len(run.rounds) > done, "a version of the run that was resumed")
    deployment.kill_node(DOUBLES)
    assert again.wait() == "finished:completed"
    return run, again, done


def test_a_late_update_is_rejected(interrupted):
    run, _, done = interrupted
    rejected = late_updates(run.rounds[:done])
    assert re.fullmatch(
        r"its update is \d+ versions old, expected at most max-staleness = 2",
        rejected[0]["reason"],
    )
    assert max(c.get("staleness", 0) for r in run.rounds for c in r["clients"]) in (1, 2)


def test_a_doubled_update_counts_once(deployment, interrupted):
    assert deployment.log("superlink").count("duplicate reply for") >= 2
    run, _, done = interrupted
    of_node = [update for update in updates_of(run) if update[0] == DOUBLES and update[2] <= done]
    assert len(of_node) == len({version for _, version, *_ in of_node}) >= 1


def test_a_killed_run_counts_no_update_twice(interrupted):
    run, again, done = interrupted
    assert f"resuming after round {done}" in again.log
    assert [record["round"] for record in run.rounds] == list(range(1, done + 6))
    assert [len(record["clients"]) for record in run.rounds] == [1] * (done + 5)
    counted = [(partition, version) for partition, version, *_ in updates_of(run)]
    assert len(counted) == len(set(counted))
    times = [record["time"] for record in run.rounds]
    assert times == sorted(times)


def test_a_killed_node_costs_nothing_else(interrupted):
    run, _, done = interrupted
    later = run.rounds[done + 1 :]
    assert {one["client"] for r in later for one in r["rejected"]} <= {f"partition {DOUBLES}"}
    assert {c["partition-id"] for r in later for c in r["clients"]} >= {0, SLOW}


def test_the_record_has_the_fields_of_a_simulation(interrupted, tmp_path):
    run, _, _ = interrupted
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

    (of_round, of_client), (round_, client) = fields(run.rounds), fields(expected)
    assert of_round - {"link-bytes-estimate"} == round_ - {"collapsed"}
    assert of_client == client - {"device"}
    for _, _, number, (began, ended) in updates_of(run):
        assert 0 <= began < ended <= run.rounds[number - 1]["time"]
