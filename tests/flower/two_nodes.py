"""A Ray cluster of two nodes on this machine, each with one CPU, while stdin is open.

    python -m tests.flower.two_nodes FOLDER

It writes a line with the address; when stdin has ended, a line with the number of nodes that are
there, and of those on which ClientApps have run. A process of its own: Ray installs signal
handlers, and leaves files open.
"""

import json
import logging
import os
import sys
from typing import Any

import ray
from ray._private import state
from ray.cluster_utils import Cluster

HEAD: dict[str, Any] = {"num_cpus": 1, "include_dashboard": False}


def main(folder: str) -> None:
    # Ray writes the cluster's address there, too, which other runs on this machine would join.
    os.environ["RAY_TMPDIR"] = folder
    os.environ["RAY_raylet_start_wait_time_s"] = "240"  # noqa: SIM112 (a busy machine)
    cluster = started()
    try:
        say({"address": cluster.address})
        sys.stdin.read()
        ray.init(address=cluster.address, log_to_driver=False, logging_level=logging.ERROR)
        actors = [actor for actor in state.actors().values() if "ClientApp" in str(actor)]
        say(
            {
                "nodes": len(ray.nodes()),
                "used": len({actor["Address"]["NodeID"] for actor in actors}),
            }
        )
        ray.shutdown()
    finally:
        cluster.shutdown()


def started(attempts: int = 4) -> Cluster:
    """Start the nodes; on a busy machine Ray's agent may need more than its 15 seconds."""
    cluster = Cluster()
    try:
        cluster.add_node(**HEAD)
        cluster.add_node(num_cpus=1)
    except Exception:  # Ray raises no other
        cluster.shutdown()
        if attempts == 1:
            raise
        return started(attempts - 1)
    return cluster


def say(what: dict[str, object]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1])
