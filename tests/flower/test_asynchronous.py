"""Asynchronous rounds in a deployment of three SuperNodes with warm workers.

Node 2 stands still during a part of each run. Node 1 sends each reply twice, and is killed in the
last run.
"""

import re

import pytest

from ravan_flwr.runs.checkpoint import load_checkpoint
from tests import short_runs
from tests.flower import NEEDS_PROC, doubling_node
from tests.flower.at_start import at_start
from tests.flower.frozen import frozen
from tests.support.deployment import ROUNDS_TIMEOUT

pytestmark = [pytest.mark.slow, NEEDS_PROC]

NODES = 3
SLOW, DOUBLING = 2, 1
SETTINGS = "clients-per-round=3 eval-every=1000 tracking='none'"
ASYNC = f"aggregation='async' concurrency=3 {SETTINGS}"


@pytest.fixture(scope="module")
def started(deployment):
    """Return the deployment with its nodes connected."""
    doubles = deployment.folder / "doubling"
    path = at_start(doubles, f"partition-id={DOUBLING} ", doubling_node.INSTALL)
    deployment.start_nodes(lambda _: "warm-worker=true", PYTHONPATH=path)
    return deployment


def trains(deployment, run, number):
    """Return whether a node has a training message of the run, as its own log says.

    On a busy machine that takes minutes, and `flwr run --stream` can end before the run does.
    """
    return f"[RUN {run.id}, ROUND " in deployment.log(f"node-{number}")


def start_run(deployment, settings):
    run = deployment.run(settings)
    run.wait_for(
        lambda: all(trains(deployment, run, number) for number in range(NODES)),
        "the nodes to train",
        ROUNDS_TIMEOUT,
    )
    return run


def updates_of(run):
    """Return each update as (partition, version it started from, round that used it, span)."""
    return [
        (c["partition-id"], r["round"] - c.get("staleness", 0), r["round"], c["span"])
        for r in run.rounds
        for c in r["clients"]
    ]


def test_a_node_that_stands_still_does_not_delay_the_others(started):
    run = start_run(started, f"num-rounds=3 local-steps=30 buffer-size=2 {ASYNC}")
    with frozen(started.folder / f"node-{SLOW}"):
        run.wait_for(lambda: len(run.rounds) >= 2, "two versions meanwhile", ROUNDS_TIMEOUT)
    assert run.wait() == "finished:completed"
    assert [len(record["clients"]) for record in run.rounds] == [2] * 3


def late_updates(rounds):
    """Return the rejections of node 2: on a busy machine other nodes may be late as well."""
    rejected = [rejection for record in rounds for rejection in record["rejected"]]
    return [rejection for rejection in rejected if rejection["client"] == f"partition {SLOW}"]


@pytest.fixture(scope="module")
def interrupted_runs(started):
    """Return a run with a late node 2 and a killed ServerApp, the resumed run, and the last round.

    Node 1 is killed during the resumed run.
    """
    settings = f"local-steps=5 buffer-size=1 max-staleness=2 {ASYNC}"
    run = start_run(started, f"num-rounds=500 {settings}")
    run.wait_for(lambda: len(run.rounds) >= 1, "a first version", ROUNDS_TIMEOUT)
    with frozen(started.folder / f"node-{SLOW}"):
        target = len(run.rounds) + 3  # node 2 has the next version at most
        run.wait_for(lambda: len(run.rounds) >= target, "versions without node 2", ROUNDS_TIMEOUT)
    run.wait_for(
        lambda: late_updates(run.rounds[:-1]), "a late update's checkpoint", ROUNDS_TIMEOUT
    )
    started.kill_serverapp("superlink")
    run.abandon()
    stopped_at = load_checkpoint(run.directory / "checkpoints").round  # or logged one more
    settings = f"num-rounds={stopped_at + 5} {settings}"
    resumed = started.run(f"{settings} resume='{run.directory}'")
    resumed.wait_for(lambda: trains(started, resumed, DOUBLING), "node 1 to train", ROUNDS_TIMEOUT)
    resumed.wait_for(
        lambda: len(run.rounds) > stopped_at, "a version after resuming", ROUNDS_TIMEOUT
    )
    started.kill_node(DOUBLING)
    assert resumed.wait() == "finished:completed"
    return run, resumed, stopped_at


def test_a_late_update_is_rejected(interrupted_runs):
    run, _, stopped_at = interrupted_runs
    rejected = late_updates(run.rounds[:stopped_at])
    assert re.search(r"\d versions old, .* max-staleness = 2$", rejected[0]["reason"])
    assert max(c.get("staleness", 0) for r in run.rounds for c in r["clients"]) in (1, 2)


def test_a_duplicate_update_counts_once(started, interrupted_runs):
    assert started.log("superlink").count("duplicate reply for") >= 2
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
    simulated = short_runs.run(
        tmp_path, num_rounds=6, aggregation="async", buffer_size=1, concurrency=3,
        devices="edge-gpus", clients_per_round=3, eval_every=1000,
    )  # fmt: skip
    expected = short_runs.records_of(simulated)

    def fields(rounds):
        clients = [client for record in rounds for client in record["clients"]]
        return [set().union(*records) for records in (rounds, clients)]

    run_round, run_client = fields(run.rounds)
    expected_round, expected_client = fields(expected)
    assert run_round - {"link-bytes-estimate"} == expected_round - {"collapsed"}
    assert run_client == expected_client - {"device"}
    for _, _, number, (began, ended) in updates_of(run):
        assert 0 <= began < ended <= run.rounds[number - 1]["time"]
