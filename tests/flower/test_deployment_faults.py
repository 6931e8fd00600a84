"""Faulty and hostile nodes on Flower's deployment runtime with TLS and authentication.

Node 1 has another fault in every round of a run: it fails, sends wrong values, and uploads hostile
objects. The run continues with node 0 to its end. At the same time another run waits for an
unresponsive node. Then both nodes are honest: two runs share them, and a run is resumed after the
SuperLink was killed. Both nodes have warm workers. tests/unit/server/test_attackers.py and
tests/properties/test_hostile_replies.py have many more faults, in process.
"""

import json
import re

import pytest

from tests import ROOT, short_runs
from tests.flower import NEEDS_PROC, faulty_client
from tests.flower.at_start import at_start
from tests.support.deployment import ROUNDS_TIMEOUT

pytestmark = [pytest.mark.slow, NEEDS_PROC]

NODES = 2
SHORT = "batch-size=8 clients-per-round=2 tracking='none'"

# round -> (fault of node 1, pattern of the reason of the rejection in the record)
FAULTS = {
    1: ("raises", "it failed with code 2: <class 'ZeroDivisionError'>:<'on fire'>"),
    2: ("nan", "H has values that are not finite"),
    3: ("question", "its reply cannot be read: ValueError: it answers message 'of my own making'"),
    4: ("chunks", "its reply cannot be read: ValueError: its tensors are .* bytes from few"),
    5: ("short", "its reply cannot be read: IndexError"),
    6: ("escape", r"x1b\[2K.*round 9/9"),
}
LAST_ROUND = len(FAULTS) + 1
STRAGGLER_TIMEOUT = 20.0  # seconds after the first reply
PLAN = {
    0: {1: {2: "after the other"}},
    1: {
        0: {number: kind for number, (kind, _) in FAULTS.items()},
        1: {1: "silent", 2: "after silence"},
    },
}


@pytest.fixture(scope="module")
def faulty_runs(deployment):
    """Return the run of all faults, and the run with an unresponsive node."""
    folder = deployment.folder / "faulty"
    install = faulty_client.INSTALL.format(folder=str(folder), plan=PLAN)
    path = at_start(folder, "flwr-clientapp", install)
    deployment.start_nodes(lambda _: "warm-worker=true budget=0.5", PYTHONPATH=path)
    settings = f"round-timeout=3600.0 {SHORT} straggler-grace"
    unresponsive_run = deployment.run(
        f"seed=1 num-rounds=2 local-steps=5 {settings}={STRAGGLER_TIMEOUT}"
    )
    run = deployment.run(f"num-rounds={LAST_ROUND} local-steps=40 {settings}=3600.0")
    unresponsive_run.wait_for(
        lambda: len(unresponsive_run.rounds) >= 1, "a round to close", ROUNDS_TIMEOUT
    )
    (folder / "closed").touch()
    assert [each.wait() for each in (run, unresponsive_run)] == ["finished:completed"] * 2
    for number in range(NODES):
        deployment.stop_node(number)
    return run, unresponsive_run


def rejection_reason(record):
    """Return the reason of the rejection of node 1's reply; node 0's is used."""
    assert [c["partition-id"] for c in record["clients"]] == [0], record["round"]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 1"
    return rejected["reason"]


def test_an_invalid_reply_is_rejected_in_its_round_only(faulty_runs):
    run, _ = faulty_runs
    *faulty, last = run.rounds
    assert [record["round"] for record in run.rounds] == list(range(1, LAST_ROUND + 1))
    for record, (_, reason) in zip(faulty, FAULTS.values(), strict=True):
        rejection = rejection_reason(record)
        assert re.search(reason, rejection), rejection
        assert len(rejection) <= 500
    assert [c["partition-id"] for c in last["clients"]] == [0, 1]
    assert last["rejected"] == []
    assert last["metrics"]["accuracy"] > 0.5
    assert "\x1b[2K" not in run.log
    assert not re.search(r"^.?round 9/9  loss 0.0000", run.log, re.MULTILINE)


def test_an_unresponsive_node_misses_its_round_and_its_late_reply_is_recorded(faulty_runs):
    _, run = faulty_runs
    first, second = run.rounds
    (seconds,) = re.findall(r"^no reply within (\S+) s", rejection_reason(first))
    assert float(seconds) >= STRAGGLER_TIMEOUT
    assert [c["partition-id"] for c in second["clients"]] == [0, 1]
    assert second["rejected"] == []
    (late,) = second["late"]
    assert late["reason"].startswith(f"late: a reply to round 1, which closed after {seconds} s")


@pytest.fixture(scope="module")
def honest_deployment(deployment, faulty_runs):
    """Restart the same nodes without faults."""
    deployment.start_nodes(lambda _: "warm-worker=true", PYTHONPATH=str(ROOT))
    return deployment


def test_two_runs_at_once_are_independent(honest_deployment):
    runs = [
        honest_deployment.run(f"method='{m}' budgets='full' num-rounds=2 local-steps=5 {SHORT}")
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
    settings = f"num-rounds=4 local-steps=5 {SHORT}"
    run = deployment.run(settings)
    run.wait_for(lambda: len(run.rounds) >= 2, "two rounds", ROUNDS_TIMEOUT)
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
    uninterrupted = short_runs.run(
        deployment.folder / "one-process", NODES,
        num_rounds=4, local_steps=5, clients_per_round=NODES,
    ).run_dir  # fmt: skip
    expected = uninterrupted / "adapter" / "adapter_model.safetensors"
    actual = run.directory / "adapter" / "adapter_model.safetensors"
    assert actual.read_bytes() == expected.read_bytes()
