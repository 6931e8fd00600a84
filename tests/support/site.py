"""Set up docs/deploy.md, typed as it is printed, on separate hosts (tests/support/network.py).

    with Network(tmp_path, ["server", "operator", "device-0"]) as network:
        site = Site(network)
        site.set_up()
        run = site.run(2)
        assert run.wait() == "finished:completed"

The page's numbers of nodes and rounds are replaced. Programs restart as their units would do it.
"""

import json
import re
import sys
import time
from typing import Any

from tests.support import ROOT
from tests.support.deployment import NGINX, wait_for
from tests.support.network import Network, Program, network_unavailable

SITE_TIMEOUT = 900.0  # seconds; a busy machine is no fault
SERVERS = ("superlink", "superexec", "proxy")
# With a short straggler timeout, rounds without an unreachable device take a third of the time.
QUICK = "tracking='none' local-steps=5 straggler-grace=20"
RUNS = "/var/lib/ravan-serverapp/runs"


def site_unavailable() -> str:
    """Return the reason why this machine cannot run a site; "" if it can."""
    return network_unavailable() or ("" if NGINX else "nginx is not installed")


def blocks(page: str, heading: str) -> list[str]:
    """Return the code blocks under a heading of a page, in order."""
    text = (ROOT / "docs" / page).read_text()
    pattern = rf"^##+ {re.escape(heading)}\n(.*?)(?=^##+ |\Z)"
    (section,) = re.findall(pattern, text, re.M | re.S)
    return re.findall(r"^```\n(.*?)^```", section, re.M | re.S)


def for_node(number: int, text: str) -> str:
    """Change the page's commands for node 0 into those for another node."""
    for name in ("node-", "device-", "partition-id="):
        text = text.replace(f"{name}0", f"{name}{number}")
    return text


def restart_always(text: str, pause: int, after: str = "") -> str:
    """Restart the last command of a block whenever it ends, as a unit with Restart=always."""
    *setting, command = re.sub(r"\\\n\s*", "", text).strip().splitlines()
    return "\n".join([*setting, f"while true; do ( exec {command} ); {after} sleep {pause}; done"])


class Site:
    """A server, an operator and devices, as many as the network has hosts device-0, device-1."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.server, self.operator = network.hosts["server"], network.hosts["operator"]
        self.devices = [host for name, host in network.hosts.items() if name.startswith("device")]
        self.programs: dict[str, Program] = {}
        self.servers = blocks("deploy.md", "3. The server")[1:4]
        steps = blocks("deploy.md", "5. A SuperNode, on each device")
        self.doctor, self.supernode, self.check = map(self._config, steps)
        exports = blocks("deploy.md", "1. Install, on every machine")[1]
        assert exports.startswith("export PATH=/opt/ravan-flwr/.venv/bin")
        network.exports = exports.replace("POLL_INTERVAL=0.1", "POLL_INTERVAL=0.5")

    def _config(self, text: str) -> str:
        # The preset's data instead of local data, and a warm worker, which saves a minute.
        text = text.replace('data-path="/data/mine" budget=0.5', "warm-worker=true")
        return text.replace("num-partitions=3", f"num-partitions={len(self.devices)}")

    def set_up(self) -> None:
        """Follow the page until the SuperNodes are connected. The last device has a poor link."""
        self.make_keys()
        folders, *_, doctor = blocks("deploy.md", "3. The server")
        self.server.type(folders)
        self.start_server()
        assert "TO DO" not in self.server.type(doctor)
        self.register()
        last = self.devices[-1]
        last.run("sed -i s/192.0.2.1/127.0.0.2/ /etc/hosts")
        self.network.relay(last, "127.0.0.2:8000", "192.0.2.1:8000", delay=0.1, loss=0.05)
        for number, device in enumerate(self.devices):
            assert "TO DO" not in device.run(for_node(number, self.doctor))
            self.start_device(number)
        self.wait_for_nodes(len(self.devices))

    def make_keys(self) -> None:
        """Make the keys on the operator's host, and copy them to their hosts."""
        make, copy, look, delete, _ = blocks("deploy.md", "2. Keys, on the operator's machine")
        self.operator.type(make)
        for number in range(len(self.devices)):
            self.operator.type(for_node(number, copy) if number else copy)
        sums = re.findall(r"^[0-9a-f]{64}", self.operator.type(look), re.M)
        own = self.operator.run("sha256sum ~/keys/superlink/superlink.key ~/keys/node-0/node.key")
        assert sums == re.findall(r"^[0-9a-f]{64}", own, re.M)
        self.operator.type(delete)

    def register(self) -> None:
        """Register the devices' keys from the operator's host, through a tunnel to the server."""
        tunnel, config, register = blocks("deploy.md", "4. Registering SuperNodes, by the operator")
        self.operator.type(tunnel)
        self.operator.type(config)
        *nodes, listed = register.splitlines()
        self.operator.type("\n".join([*nodes[: len(self.devices)], listed]))

    def start_server(self, *names: str) -> None:
        """Start the page's three programs on the server, or some of them."""
        for name, text in zip(SERVERS, self.servers, strict=True):
            if names and name not in names:
                continue
            self.programs[name] = self.server.start(restart_always(text, 2))
            if name == "superlink":
                wait_for(
                    lambda: "Uvicorn running" in self.programs["superlink"].log, "it", SITE_TIMEOUT
                )

    def restart_server(self) -> None:
        """End all three and start them again."""
        for name in SERVERS:
            self.programs[name].end()
        self.start_server()

    def start_device(self, number: int) -> Program:
        """Start a SuperNode and the check beside it; return the SuperNode."""
        text = for_node(number, self.supernode)
        node = self.programs[f"node-{number}"] = self.devices[number].start(restart_always(text, 5))
        text = for_node(number, self.check).replace("EVERY=60", "EVERY=5")
        self.programs[f"check-{number}"] = self.devices[number].start(text)
        return node

    def end_device(self, number: int) -> None:
        """Kill a device's programs, without a message to the server."""
        self.programs[f"node-{number}"].end()
        self.programs[f"check-{number}"].end()

    def online(self) -> int:
        """Return how many SuperNodes the SuperLink lists as online."""
        output = self.operator.run("flwr supernode list edge --format json")
        return sum(node["status"] == "online" for node in json.loads(output)["nodes"])

    def wait_for_nodes(self, number: int) -> None:
        """Wait until so many SuperNodes are online."""
        wait_for(lambda: self.online() == number, f"{number} nodes", SITE_TIMEOUT, pause=2)

    def run(self, rounds: int, more: str = "", folder: str = "") -> "Run":
        """Type `flwr run` of the page, with another number of rounds and another folder."""
        text = blocks("deploy.md", "6. A run, by the operator")[0]
        folder = folder or f"{RUNS}/{time.monotonic_ns()}"
        text = text.replace(RUNS, folder)
        assert folder in text
        text = text.replace("num-rounds=3", f"num-rounds={rounds} {QUICK} {more}")
        text = text.replace("clients-per-round=3", f"clients-per-round={len(self.devices)}")
        # `flwr run` occupies its terminal; later commands run in another one.
        return Run(self, self.operator.start(text), folder)

    def show_logs(self) -> None:
        """Print the end of each program's output, for a failed test."""
        for name, program in sorted(self.programs.items()):
            sys.stdout.write(f"--- {name}\n{program.log[-3000:]}\n")


class Run:
    """One `flwr run`, from its submission to its end."""

    def __init__(self, site: Site, program: Program, folder: str) -> None:
        self.site, self.program, self.folder = site, program, folder
        wait_for(lambda: bool(self.id) or self.stream_ended, "the run to begin", SITE_TIMEOUT)
        assert self.id, program.log

    @property
    def stream_ended(self) -> bool:
        """Return whether `flwr run --stream` has ended; the run may continue."""
        return self.program.process.poll() is not None

    @property
    def id(self) -> str:
        """Return the run's id from the output of `flwr run`; "" before it is printed."""
        found = re.search(r"Successfully started run (\d+)", self.program.log)
        return found[1] if found else ""

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Return the records of finished rounds."""
        text = self.site.server.run(f"cat {self.folder}/*/rounds.jsonl 2>/dev/null || true")
        return [json.loads(line) for line in text.splitlines()]

    @property
    def status(self) -> str:
        """Return the SuperLink's status of the run, such as `running` or `finished:completed`."""
        output = self.site.operator.run(f"flwr ls edge --run-id {self.id} --format json")
        return str(json.loads(output)["runs"][0]["status"])

    def wait_for_rounds(self, number: int) -> None:
        """Wait until so many rounds are recorded."""
        wait_for(lambda: len(self.rounds) >= number, f"round {number}", SITE_TIMEOUT, pause=1)

    def wait_for_all(self) -> None:
        """Wait for one more round in which all devices take part."""
        before, all_of_them = len(self.rounds), len(self.site.devices)
        done = lambda: all_of_them in self.took_part(before)  # noqa: E731
        wait_for(done, "a round of all devices", SITE_TIMEOUT, pause=1)

    def wait(self) -> str:
        """Wait for the end of the run; return its status."""
        wait_for(lambda: self.status.startswith("finished"), "its end", SITE_TIMEOUT, pause=2)
        return self.status

    def took_part(self, since: int = 0) -> list[int]:
        """Return the number of used clients of each round after the first `since`."""
        return [len(record["clients"]) for record in self.rounds[since:]]
