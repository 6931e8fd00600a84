"""A run in a Ray cluster of two nodes, both on this machine."""

import json
import os
import shutil
import subprocess
import tempfile

import pytest

from ravan_flwr.launch.cluster import find_cluster
from testing.deployment import copy_app
from tests import ROOT


@pytest.fixture
def folder():
    """A short path: Ray's sockets lie below it, and the system allows them 107 characters."""
    path = tempfile.mkdtemp(prefix="rc", dir="/tmp")
    yield path
    shutil.rmtree(path, ignore_errors=True)


def test_a_run_uses_both_nodes_of_a_cluster(folder, python, tmp_path):
    command = [python.executable, "-m", "tests.flower.two_nodes", folder]
    with subprocess.Popen(
        command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as two_nodes:
        assert two_nodes.stdin
        assert two_nodes.stdout
        address = json.loads(two_nodes.stdout.readline())["address"]
        environment = os.environ | {"RAY_ADDRESS": address}
        found = find_cluster(environment)
        assert found is not None
        assert [machine.cpus for machine in found.machines] == [1, 1]
        # What the command finds without an address: the cluster that was started last.
        environment |= {"RAY_ADDRESS": "auto", "RAY_TMPDIR": folder}
        assert find_cluster(environment) == found

        words = ["num-clients=4", "clients-per-round=4", "num-rounds=2", "local-steps=2"]
        words += ["report=false", "tracking=none", f"output-dir={tmp_path / 'runs'}"]
        done = python.run(
            ["-m", "ravan_flwr", "simulate", "--engine", "flower", *words],
            environment=os.environ | {"RAY_ADDRESS": address},
            folder=copy_app(tmp_path / "app"),
        )
        two_nodes.stdin.close()
        seen = json.loads(two_nodes.stdout.readline())

    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"the Ray cluster at {address}: 2 machines, 2 CPUs, 0 GPUs" in done.stdout
    (run,) = (tmp_path / "runs").iterdir()
    for line in (run / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["rejected"] == []
        assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2, 3]
    assert seen == {"nodes": 2, "used": 2}  # a run ends, and leaves the cluster as it is
