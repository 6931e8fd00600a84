"""What happens to real fleets, on Flower's deployment runtime with TLS and authentication.

Node 1 is faulty in every round in another way, and the run goes on with node 0. The SuperLink is
killed and the run is gone on with. Two runs share the nodes. Both nodes have warm workers.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.deployment import Deployment, wait_for
from tests import ROOT

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(900),
]

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
    12: ("silent", "no reply within 25 s"),
}

# Python runs a `sitecustomize` on its path at every start; this one changes what the client says.
FAULTY = """
import sys
if any("flwr-clientapp" in word for word in sys.orig_argv):
    import time
    import numpy as np
    from flwr.app import Array, ArrayRecord, RecordDict
    from flwr.clientapp import ClientApp

    FAULTS = {faults!r}
    answer = ClientApp.__call__

    def changed(h, index, fault):
        if fault == "nan":
            h[0, 0, 0] = np.nan
        elif fault == "infinity":
            h[-1] = np.inf
        elif fault == "shape":
            h = h[:, :, :-1]
        elif fault == "dtype":
            h = h.astype("float64")
        elif fault == "index":
            index[0] &= 0b11111110 if index[0] & 1 else 0b11111101 if index[0] & 2 else 0b11111011
        elif fault == "heads":
            h, index[:] = np.concatenate([h, h]), 255
        elif fault == "norm":
            h = h * 1e6
        return h, index

    def faulty(self, message, context):
        reply = answer(self, message, context)
        if message.metadata.message_type != "train":
            return reply
        fault = FAULTS.get(message.content.config_records["config"]["round"])
        arrays, metrics = reply.content["arrays"], reply.content["metrics"]
        if fault == "raises":
            raise ZeroDivisionError("on fire")
        if fault == "silent":
            time.sleep(28)
        if fault == "round":
            metrics["round"] = 99
        if fault == "nothing":
            reply.content = RecordDict()
            return reply
        sent = {{name: array for name, array in arrays.items()}}
        h = np.frombuffer(sent["H"].data, "float32").reshape(sent["H"].shape).copy()
        index = np.frombuffer(sent["heads"].data, "uint8").copy()
        h, index = changed(h, index, fault)
        h = np.ascontiguousarray(h)
        data = h.tobytes()[: -1 if fault == "bytes" else None]
        stype = sent["H"].stype
        reply.content["arrays"] = ArrayRecord(sent | {{
            "H": Array(str(h.dtype), h.shape, stype, data),
            "heads": Array("uint8", index.shape, stype, index.tobytes()),
        }})
        return reply

    ClientApp.__call__ = faulty
"""


@pytest.fixture(scope="module")
def deployment(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    with Deployment(folder, nodes=2) as running:
        (running.folder / "faulty").mkdir()
        kinds = {number: kind for number, (kind, _) in FAULTS.items()}
        (running.folder / "faulty" / "sitecustomize.py").write_text(FAULTY.format(faults=kinds))
        for number in range(2):
            running.register(number)
        start_nodes(running, faulty=True)
        yield running
    assert running.left_running == []


def start_nodes(deployment, *, faulty):
    for number in range(2):
        paths = [str(deployment.folder / "faulty"), str(ROOT)] if number and faulty else [str(ROOT)]
        deployment.start_node(
            number,
            f"partition-id={number} num-partitions=2 warm-worker=true{' budget=0.5' * faulty}",
            PYTHONPATH=os.pathsep.join(paths),
        )
    assert [deployment.wait_for_node(number) for number in range(2)] == [True, True]


def test_a_reply_that_is_no_good_costs_its_round_and_nothing_else(deployment):
    settings = f"num-rounds={len(FAULTS) + 1} round-timeout=25.0 max-update-norm=100.0 {SHORT}"
    run = deployment.run(settings)
    assert run.wait() == "finished:completed"
    records = {record["round"]: record for record in run.rounds}
    assert len(records) == len(FAULTS) + 1
    for number, (_, reason) in FAULTS.items():
        assert [c["partition-id"] for c in records[number]["clients"]] == [0], number
        (rejected,) = records[number]["rejected"]
        assert rejected["client"] == "partition 1"
        assert reason in rejected["reason"], number
    last = records[len(FAULTS) + 1]
    assert [c["partition-id"] for c in last["clients"]] == [0, 1]
    (late,) = last["rejected"]
    assert late["reason"].startswith("late: a reply to round 12, which closed after 25 s")
    assert last["metrics"]["accuracy"] > 0.5


def test_two_runs_at_once_do_not_meet(deployment):
    stop_nodes(deployment)
    start_nodes(deployment, faulty=False)
    runs = [
        deployment.run(f"method='{m}' budgets='full' num-rounds=2 {SHORT}")
        for m in ("ravan", "flexlora")
    ]
    for run, method in zip(runs, ("ravan", "flexlora"), strict=True):
        assert run.wait() == "finished:completed"
        summary = json.loads((run.directory / "summary.json").read_text())
        assert (summary["method"], summary["rounds"], summary["rejected"]) == (method, 2, 0)
        for record in run.rounds:
            assert [c["partition-id"] for c in record["clients"]] == [0, 1]


def test_a_run_goes_on_after_the_superlink_was_killed(deployment):
    settings = f"num-rounds=4 {SHORT}"
    run = deployment.run(settings)
    wait_for(lambda: len(run.rounds) >= 2, "two rounds")
    deployment.kill_superlink()
    done = len(run.rounds)
    run.abandon()
    deployment.start_superlink()
    again = deployment.run(f"{settings} resume='{run.directory}'")
    assert again.wait() == "finished:completed"
    assert f"going on after round {done}" in again.log
    assert [record["round"] for record in run.rounds] == [1, 2, 3, 4]
    assert all(record["rejected"] == [] for record in run.rounds)

    # The same bits as in one process that nothing happened to.
    folder = deployment.folder / "one-process"
    subprocess.run(
        [sys.executable, "-m", "ravan_flwr", "simulate", "num-clients=2", f"output-dir={folder}",
         *settings.replace("'", "").split()],
        env=os.environ | {"OMP_NUM_THREADS": "1"}, cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (expected,) = folder.glob("*/adapter/adapter_model.safetensors")
    got = run.directory / "adapter" / "adapter_model.safetensors"
    assert got.read_bytes() == expected.read_bytes()


def stop_nodes(deployment):
    for number in range(2):
        deployment.stop_node(number)
