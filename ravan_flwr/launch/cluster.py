"""Find the Ray cluster in which a simulation will run, and what its machines have.

Flower's simulation runtime calls `ray.init` without an address. Ray then takes the cluster that
RAY_ADDRESS names, or the one that the last `ray start` on this machine started or joined, or it
starts one of its own, of this machine alone. This module finds out which, before anything starts.

    python -m ravan_flwr.launch.cluster HOST:PORT

asks each machine what it has, and writes the answers as JSON. It is a process of its own: one that
has joined a cluster has Ray's signal handlers and threads from then on, and one that waits for a
cluster that does not answer can be ended.
"""

import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.runs.console import count
from ravan_flwr.training.machine import Gpu

ADDRESS = "RAY_ADDRESS"
ANSWER_TIMEOUT = 5.0  # for a connection
ASK_TIMEOUT = 120.0  # for all machines
MACHINE_TIMEOUT = 60.0  # for one of them; starting Python on a busy one takes a while


@dataclass(frozen=True)
class Machine:
    """Hold what a machine gives to a cluster, and which copy of this app it has."""

    name: str
    cpus: int
    gpus: int  # that Ray may use
    cards: tuple[Gpu, ...]  # that the machine has
    code: str

    def usable(self) -> list[Gpu]:
        """List as many GPUs as Ray may use; which they are is unknown, so those with least room."""
        return sorted(self.cards, key=lambda card: card.free or 0)[: self.gpus]


@dataclass(frozen=True)
class Cluster:
    """Hold the machines of a cluster, the one that this process is on first."""

    address: str
    machines: tuple[Machine, ...]

    @property
    def cpus(self) -> int:
        return sum(machine.cpus for machine in self.machines)

    @property
    def gpus(self) -> list[Gpu]:
        return [gpu for machine in self.machines for gpu in machine.usable()]

    def told(self) -> str:
        """Describe it in a line for people."""
        return (
            f"the Ray cluster at {self.address}: {count(len(self.machines), 'machine')}, "
            f"{count(self.cpus, 'CPU')}, {count(len(self.gpus), 'GPU')}\n"
        )


def find_cluster(environment: Mapping[str, str] = os.environ) -> Cluster | None:
    """Find the cluster that a simulation started with this environment would join, if any."""
    named = environment.get(ADDRESS, "")
    if named == "local":
        return None
    address = _last_started(environment) if named in ("", "auto") else named
    if not _answers(address):
        if not named:  # one that has ended: Ray starts its own
            return None
        raise ValueError(
            f"{ADDRESS} = {named!r}: nothing answers at {address or 'the last `ray start`'}, "
            "expected HOST:PORT of a Ray cluster that this machine is part of; see whether it is "
            "up (`ray status --address=HOST:PORT`), start it (`ray start --head`) or join it "
            f"(`ray start --address=HOST:PORT`), or unset {ADDRESS} for a run on this machine alone"
        )
    return Cluster(address, _checked(address, _ask(address, environment)))


def _last_started(environment: Mapping[str, str]) -> str:
    """Read the address that Ray itself reads where none is named; "" if there is none."""
    place = environment.get("RAY_TMPDIR", environment.get("TMPDIR", "/tmp"))  # noqa: S108 (Ray's own)
    file = Path(place) / "ray" / "ray_current_cluster"
    try:
        return file.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return ""


def _answers(address: str) -> bool:
    """Tell whether an address is HOST:PORT, and something there takes a connection."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        return False
    with suppress(OSError):
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_TIMEOUT).close()
        return True
    return False


def _ask(address: str, environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """Ask the machines, in a process that can be ended."""
    command = [sys.executable, "-m", "ravan_flwr.launch.cluster", address]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=ASK_TIMEOUT,
            stdin=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        said = f"no answer within {ASK_TIMEOUT:g} s"
    else:
        if done.returncode == 0:
            answers: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
            return answers
        said = _reason(done.stderr) or f"status {done.returncode}"
    raise ValueError(
        f"the Ray cluster at {address} cannot be asked what it has ({said}), expected one that "
        "this machine is part of, with the same Ray and Python 3.x; run `ray start "
        f"--address={address}` on this machine, from this environment, or set {ADDRESS}=local for "
        "a run on this machine alone"
    )


def _reason(said: str) -> str:
    """Find the error in what a Python program wrote: the last one, which may have several lines."""
    lines = said.splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return " ".join(" ".join(lines[starts[-1] :] if starts else lines[-1:]).split())[:400]


def _checked(address: str, answers: list[dict[str, Any]]) -> tuple[Machine, ...]:
    """Make machines of the answers; ValueError where the clients cannot run on one of them."""
    for answer in answers:
        if problem := answer.get("problem"):
            raise ValueError(
                f"machine {answer['name']} of the Ray cluster at {address} cannot run this app "
                f"({' '.join(problem.split())[:300]}), expected ravan-flwr in the environment "
                "from which `ray start` was called there; install it, and start Ray there again"
            )
    machines = tuple(
        Machine(**answer | {"cards": tuple(Gpu(**card) for card in answer["cards"])})
        for answer in answers
    )
    if differing := [machine.name for machine in machines if machine.code != machines[0].code]:
        raise ValueError(
            f"machines {', '.join(differing)} of the Ray cluster at {address} have another "
            f"ravan-flwr than {machines[0].name}, expected the same code on all; install the same "
            "version there, and start Ray there again"
        )
    if not sum(machine.cpus for machine in machines):
        raise ValueError(
            f"the Ray cluster at {address} has no CPU for a client, expected one at least; start "
            "a machine's part of it with --num-cpus above 0"
        )
    return machines


def _ask_with_ray(address: str) -> list[dict[str, Any]]:
    """Join the cluster, and ask this machine first, then the others by address."""
    import ray  # noqa: PLC0415 (the parent process imports this module, and no Ray)
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy  # noqa: PLC0415

    # Ray's words go to stderr, with the reason if it cannot connect.
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    asked = ray.remote(num_cpus=0, max_retries=0)(_seen_here)
    here = ray.get_runtime_context().get_node_id()
    nodes = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    nodes.sort(key=lambda node: (node["NodeID"] != here, node["NodeManagerAddress"]))
    on = [NodeAffinitySchedulingStrategy(node["NodeID"], soft=False) for node in nodes]
    replies = [asked.options(scheduling_strategy=one).remote() for one in on]
    found = []
    for node, reply in zip(nodes, replies, strict=True):
        try:
            said = ray.get(reply, timeout=MACHINE_TIMEOUT)
        except Exception as error:  # noqa: BLE001 (whatever is wrong there is told)
            said = {"problem": f"{type(error).__name__}: {error}"}
        cpus, gpus = (int(node["Resources"].get(kind, 0)) for kind in ("CPU", "GPU"))
        found.append({"name": node["NodeManagerAddress"], "cpus": cpus, "gpus": gpus, **said})
    return found


def _seen_here() -> dict[str, Any]:
    """Tell what the machine that this runs on has: its copy of this app, and its GPUs."""
    import os  # noqa: PLC0415 (Ray sends this function alone)
    from dataclasses import asdict  # noqa: PLC0415

    try:
        from ravan_flwr.messages.fingerprint import code_fingerprint  # noqa: PLC0415
        from ravan_flwr.training.machine import VISIBLE, visible_gpus  # noqa: PLC0415
    except ImportError as error:
        return {"problem": f"{type(error).__name__}: {error}"}
    # Ray hides GPUs from a task that asks for none.
    environment = {name: value for name, value in os.environ.items() if name != VISIBLE}
    cards = [asdict(gpu) for gpu in visible_gpus(environment)]
    return {"code": code_fingerprint(), "cards": cards}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(_ask_with_ray(sys.argv[1])) + "\n")
