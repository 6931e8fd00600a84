"""A run in a Ray cluster of two nodes, both on this machine."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import pytest
import ray
from ray.cluster_utils import Cluster

from ravan_flwr.launch.cluster import find_cluster
from tests import ROOT


@pytest.fixture(scope="module")
def cluster():
    # A short path: Ray's sockets lie below it, and the system allows them 107 characters.
    folder = tempfile.mkdtemp(prefix="rc", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        # There it writes its address, too, which other runs on this machine would join.
        patch.setenv("RAY_TMPDIR", folder)
        patch.setenv("RAY_raylet_start_wait_time_s", "240")  # a busy machine
        nodes = Cluster(
            initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False}
        )
        try:
            nodes.add_node(num_cpus=1)
            yield nodes
        finally:
            nodes.shutdown()
            shutil.rmtree(folder, ignore_errors=True)


def test_a_run_uses_both_nodes_of_a_cluster(cluster, tmp_path):
    environment = os.environ | {"RAY_ADDRESS": cluster.address}
    found = find_cluster(environment)
    assert found == find_cluster(os.environ | {"RAY_ADDRESS": "auto"})
    assert found is not None
    assert [machine.cpus for machine in found.machines] == [1, 1]

    words = ["num-clients=4", "clients-per-round=4", "num-rounds=2", "local-steps=2"]
    words += ["report=false", "tracking=none", f"output-dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "ravan_flwr", "run", *words],
        cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert f"the Ray cluster at {cluster.address}: 2 machines, 2 CPUs, 0 GPUs" in done.stdout
    (run,) = tmp_path.iterdir()
    for line in (run / "rounds.jsonl").read_text().splitlines():
        record = json.loads(line)
        assert record["rejected"] == []
        assert [client["partition-id"] for client in record["clients"]] == [0, 1, 2, 3]

    ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
    try:
        assert len(ray.nodes()) == 2  # a run ends, and leaves the cluster as it is
        clients = [a for a in ray._private.state.actors().values() if "ClientApp" in str(a)]
        nodes = {actor["Address"]["NodeID"] for actor in clients}
        assert nodes == {node["NodeID"] for node in ray.nodes()}
    finally:
        ray.shutdown()
