"""Measure many SuperNodes on one machine: memory and CPU of SuperLink and ServerApp.

    python -m benchmarks.many_nodes                 # 5, 10, 20 and 50 nodes
    python -m benchmarks.many_nodes --nodes 5 10

Each SuperNode is a process with its own key, over TLS, and each message starts a client process,
without warm workers. SuperNodes and client processes are forks of one process
(tests/fork_server.py), so that one machine has enough memory. SuperLink and ServerApp are started
normally. The last nodes join during a run. Then a fifth of all nodes is killed
at random in a round. Messages go to `--clients` nodes a round, so that the remaining growth comes
from the polls of waiting nodes. CPU is processor seconds a second.
"""

import argparse
import json
import os
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import psutil

from ravan_flwr.launch.superlink import list_processes
from tests.fork_server import LIBRARIES, ForkServer, Python, fork_of
from tests.support.deployment import RUN_TIMEOUT, Deployment, Run, wait_for

WAITING, RUNNING = "no run", "rounds"
WINDOW = 60.0  # seconds of measurement for a row of the table
POLL_SECONDS = "2"  # seconds between two polls of a SuperNode's own processes
KILLED = 0.2
SPARE = 4e9  # bytes of memory that stay free
NODE = 1.5e8  # bytes of memory of a node, with its client process
SETTINGS = "method='ravan' tracking='none' local-steps=1 eval-every=10 straggler-grace=15"
REGISTER = """
import sys
from flwr.cli.app import app
for key in sys.argv[1:]:
    app(["supernode", "register", key, "edge", "--format", "json"], standalone_mode=False)
"""


@dataclass
class Row:
    """The resources of the server's processes with this many nodes connected."""

    nodes: int
    what: str
    rounds: int
    superlink_cpu: float
    superlink_mb: float
    serverapp_cpu: float
    serverapp_mb: float
    all_nodes_mb: float


class Farm:
    """The deployment, its run and the measurements."""

    def __init__(self, deployment: Deployment, python: Python, nodes: int, clients: int) -> None:
        self.deployment, self.nodes, self.clients = deployment, nodes, clients
        path = os.pathsep.join([str(python.scripts), os.environ["PATH"]])
        self._forks = {"PATH": path, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": POLL_SECONDS}
        self.connected: list[int] = []
        self.rows: list[Row] = []
        self.run: Run | None = None

    def register(self) -> float:
        """Register all keys, as `flwr supernode register` does; return the seconds of each."""
        keys = [self.deployment.keys / f"node-{n}" / "node.pub" for n in range(self.nodes)]
        began = time.monotonic()
        process = self.deployment.start(
            "operator", sys.executable, "-c", REGISTER, *map(str, keys), log="register"
        )
        assert process.wait() == 0
        assert len(self.deployment.listed_nodes()) == self.nodes
        return (time.monotonic() - began) / self.nodes

    def join(self, number: int) -> float:
        """Add nodes up to this number; in a run, wait for their answers. Return seconds."""
        began, new = time.monotonic(), range(len(self.connected), number)
        for node in new:
            config = f"partition-id={node} num-partitions={self.nodes}"
            self.deployment.start_node(node, config, **self._forks)
        assert all(self.deployment.wait_for_node(node) for node in new)
        self.connected += new
        if self.run is not None:
            self.answers(new)
        return time.monotonic() - began

    def answers(self, nodes: range | list[int]) -> None:
        """Wait until each node has sent its first reply, which answers the query."""
        log = self.deployment.log
        done = lambda: all("Sent successfully" in log(f"node-{n}") for n in nodes)  # noqa: E731
        wait_for(done, "the nodes' answers", RUN_TIMEOUT, pause=1)

    def kill(self) -> int:
        """Kill a fifth of the nodes at once; return how many."""
        number = round(KILLED * len(self.connected))
        chosen = np.random.default_rng(0).choice(self.connected, number, replace=False)
        for node in chosen:
            self.deployment.kill_node(int(node))
        self.connected = [node for node in self.connected if node not in chosen]
        return len(chosen)

    def measure(self, what: str) -> None:
        """Add a row: the resources of the server's processes over a while."""
        rounds, before, began = self.rounds, self._servers(), time.monotonic()
        time.sleep(WINDOW)
        after, seconds = self._servers(), time.monotonic() - began
        used = {
            name: (after[name][0] - before.get(name, after[name])[0]) / seconds for name in after
        }
        row = Row(
            len(self.connected), what, self.rounds - rounds,
            used["superlink"], after["superlink"][1],
            used.get("serverapp", 0.0), after.get("serverapp", (0.0, 0.0))[1],
            sum(self._memory(f"node-{node}") for node in self.connected),
        )  # fmt: skip
        self.rows.append(row)
        print(json.dumps(asdict(row)), flush=True)

    @property
    def rounds(self) -> int:
        """Count the finished rounds."""
        return len(self.run.rounds) if self.run else 0

    def _servers(self) -> dict[str, tuple[float, float]]:
        """Read CPU seconds and MB of the SuperLink and the ServerApp."""
        found = {}
        for pid in list_processes(self.deployment.folder / "superlink"):
            process = psutil.Process(pid)
            command = " ".join(process.cmdline())
            for name in ("superlink", "serverapp"):
                if f"-{name}" in command:
                    times = process.cpu_times()
                    memory = process.memory_info().rss / 1e6
                    found[name] = (times.user + times.system, memory)
        return found

    def _memory(self, machine: str) -> float:
        """Return the MB of a node's processes, with shared memory divided among them."""
        total = 0.0
        for pid in list_processes(self.deployment.folder / machine):
            try:
                for process in (pid, fork_of(pid)):
                    total += psutil.Process(process).memory_full_info().pss / 1e6
            except (psutil.Error, OSError):  # it has ended
                continue
        return total


def main() -> None:
    """Run the measurements, and print a row for each number of nodes."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=[5, 10, 20, 50])
    parser.add_argument("--clients", type=int, default=2, help="clients a round")
    parser.add_argument("--rounds", type=int, default=10, help="least number of rounds")
    parser.add_argument("--limit", type=float, default=1500.0, help="seconds; no node joins after")
    parser.add_argument("--json", type=Path, help="write the rows there, too")
    options = parser.parse_args()
    ends, nodes = time.monotonic() + options.limit, max(options.nodes)
    with (
        ForkServer(LIBRARIES) as python,
        tempfile.TemporaryDirectory(prefix="ravan-bench-") as folder,
        Deployment(Path(folder), nodes=nodes) as deployment,
    ):
        farm = Farm(deployment, python, nodes, options.clients)
        print(f"registered {nodes} keys, {farm.register():.2f} s each", flush=True)
        grow(farm, options.nodes, ends)
        if farm.run is not None:
            shrink(farm, options.rounds, ends)
    if options.json:
        options.json.write_text(json.dumps([asdict(row) for row in farm.rows], indent=1) + "\n")
    extrapolate(farm.rows)


def grow(farm: Farm, numbers: list[int], ends: float) -> None:
    """Add nodes until all are connected, the time is up or memory is short."""
    numbers = sorted(numbers)
    for number in numbers:
        connected = len(farm.connected)
        if psutil.virtual_memory().available < SPARE + (number - connected) * NODE:
            print(f"no more than {connected} nodes: memory is short", flush=True)
            break
        if time.monotonic() > ends:
            print(f"no more than {connected} nodes: the time is up", flush=True)
            break
        seconds = farm.join(number)
        print(f"{number} nodes, the last {number - connected} in {seconds:.0f} s", flush=True)
        if farm.run is None:
            farm.measure(WAITING)
            if number < numbers[-2:][0]:
                continue
            settings = f"{SETTINGS} num-rounds=10000 clients-per-round={farm.clients}"
            farm.run = farm.deployment.run(settings)
            wait_for(lambda: farm.rounds > 0, "the first round", RUN_TIMEOUT)
        farm.measure(RUNNING)


def shrink(farm: Farm, rounds: int, ends: float) -> None:
    """Kill a fifth of the nodes in a round, and check that rounds continue."""
    assert farm.run is not None
    first_round, began = farm.rounds, time.monotonic()
    print(f"killed {farm.kill()} nodes after round {first_round}", flush=True)
    wait_for(
        lambda: farm.rounds >= first_round + 2
        and (farm.rounds >= rounds or time.monotonic() > ends),
        "rounds without the killed nodes", RUN_TIMEOUT, pause=1,
    )  # fmt: skip
    seconds = (time.monotonic() - began) / (farm.rounds - first_round)
    print(f"{farm.rounds - first_round} rounds after that, {seconds:.1f} s each", flush=True)
    farm.measure("a fifth killed")
    assert farm.run.status == "running"
    lost = sum(len(record["rejected"]) for record in farm.run.rounds)
    print(f"{farm.rounds} rounds in all, {lost} replies rejected or missing")


def extrapolate(rows: list[Row], nodes: int = 200) -> None:
    """Fit lines to the cost of waiting nodes, and of the ServerApp; extrapolate to more nodes."""
    for name, what in (
        ("superlink_cpu", WAITING), ("superlink_mb", WAITING),
        ("serverapp_cpu", RUNNING), ("serverapp_mb", RUNNING),
    ):  # fmt: skip
        fitted = [row for row in rows if row.what == what]
        if len(fitted) < 2:
            continue
        slope, base = np.polyfit(
            [row.nodes for row in fitted], [getattr(row, name) for row in fitted], 1
        )
        print(
            f"{name}: {base:.3g} + {slope:.3g} a node, extrapolated to {nodes} nodes: "
            f"{base + nodes * slope:.3g}"
        )


if __name__ == "__main__":
    main()
