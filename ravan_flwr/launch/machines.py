"""Ask each machine of a Ray cluster what it has, and write the answers as JSON.

    python -m ravan_flwr.launch.machines HOST:PORT

A program of its own: a process that has joined a cluster has Ray's signal handlers and threads
from then on, and one that waits for a cluster that does not answer can be ended.
"""

import json
import logging
import sys
from typing import Any

TIMEOUT = 60.0  # for the machines; starting Python on a busy one takes a while


def main(address: str) -> None:
    """Write a list: this machine first, then the others by address."""
    import ray  # noqa: PLC0415 (the parent process imports this module, and no Ray)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    # Ray's words go to stderr, with the reason if it cannot connect.
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    asked = ray.remote(num_cpus=0, max_retries=0)(seen)
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    replies = [
        asked.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote()
        for node in nodes
    ]
    found = []
    for node, reply in zip(nodes, replies, strict=True):
        has = node["Resources"]
        try:
            said = ray.get(reply, timeout=TIMEOUT)
        except Exception as error:  # noqa: BLE001 (whatever is wrong there is told)
            said = {"problem": f"{type(error).__name__}: {error}"}
        found.append(
            {
                "name": node["NodeManagerAddress"],
                "cpus": int(has.get("CPU", 0)),
                "gpus": int(has.get("GPU", 0)),
                **said,
            }
        )
    sys.stdout.write(json.dumps(found) + "\n")


def seen() -> dict[str, Any]:
    """Tell what the machine that this runs on has: its copy of this app, and its GPUs."""
    import os  # noqa: PLC0415 (Ray sends this function alone)
    from dataclasses import asdict  # noqa: PLC0415

    try:
        from ravan_flwr.messages.fingerprint import code_fingerprint  # noqa: PLC0415
        from ravan_flwr.training.gpus import VISIBLE, visible_gpus  # noqa: PLC0415
    except ImportError as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    # Ray hides GPUs from a task that asks for none.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    cards = [asdict(gpu) for gpu in visible_gpus(environment)]
    return {"code": code_fingerprint(), "cards": cards}


if __name__ == "__main__":
    main(sys.argv[1])
