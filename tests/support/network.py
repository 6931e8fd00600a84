"""Separate hosts on one machine: each in its own namespaces, joined by a switch.

    with Network(tmp_path, ["server", "operator"]) as network:
        network.hosts["operator"].type("ping -c 1 server.example.org")

A host has its own addresses, processes and view of the file system: its files below /etc, /var,
/opt, /root and /run are private, the rest is this machine's. So commands run as docs/deploy.md
prints them. `ssh` and `scp` need no server here: `type` emulates them. All processes of a host end
with its first process, and all hosts end with the process that made the network. Given
`python.inside` of tests/fork_server.py, the Python programs of a host are forks.
"""

import asyncio
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.support import ROOT
from tests.support.deployment import copy_app

DOMAIN = "example.org"
NET = "192.0.2"  # addresses for documents (RFC 5737)
SCRIPTS = "/opt/ravan-flwr/.venv/bin"
OVERLAID = ("/etc", "/var", "/opt", "/root")


def network_unavailable() -> str:
    """Return the reason why this machine cannot have a network; "" if it can."""
    for program in ("unshare", "nsenter", "ip", "tc"):
        if shutil.which(program) is None:
            return f"{program} is not installed"
    with tempfile.TemporaryDirectory() as folder:
        # In a container, an overlay over an overlay may be refused.
        script = (
            f"ip link add br0 type bridge && mkdir {folder}/upper {folder}/work && mount -t "
            f"overlay overlay -o lowerdir=/etc,upperdir={folder}/upper,workdir={folder}/work /etc"
        )
        command = ["unshare", "--mount", "--net", "--pid", "--fork", "sh", "-c", script]
        ended = subprocess.run(command, capture_output=True, text=True)
    return f"no namespaces: {ended.stderr.strip()} (only root can)" if ended.returncode else ""


class Host:
    """One machine of the network."""

    def __init__(self, network: "Network", name: str, number: int) -> None:
        self.network, self.name, self.number = network, name, number
        self.address = f"{NET}.{number}"
        # Its first process ends when its input closes, and with it all others.
        self._process = subprocess.Popen(
            ["unshare", "--mount", "--net", "--uts", "--pid", "--fork", "--kill-child", "cat"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip
        self.pid = _child_of(self._process.pid)
        self._python = None if network.inside is None else network.inside(self.pid)
        self._folder = network.folder / name
        self._programs: list[Program] = []
        link = f"v{network.mark}{number}"
        network.switch("ip", "link", "add", link, "type", "veth", "peer", "name", "eth0",
                       "netns", str(self.pid))  # fmt: skip
        network.switch("ip", "link", "set", link, "master", "br0", "up")
        self._link = link
        script = ["mount -t proc proc /proc", f"hostname {name}"]
        for path in OVERLAID:
            upper, work = (self._folder / f"{kind}{path}" for kind in ("files", "work"))
            upper.mkdir(parents=True)
            work.mkdir(parents=True)
            layers = f"lowerdir={path},upperdir={upper},workdir={work}"
            script.append(f"mount -t overlay overlay -o {layers} {path}")
        names = "".join(f"{NET}.{n} {h}.{DOMAIN}\n" for n, h in enumerate(network.names, 1))
        script += [
            "mount -t tmpfs tmpfs /run",
            "mkdir -p /opt/ravan-flwr",
            f"mount --bind {network.app} /opt/ravan-flwr",
            f"mount --bind {self._python.scripts} {SCRIPTS}" if self._python else "",
            f"printf %s {shlex.quote('127.0.0.1 localhost' + chr(10) + names)} > /etc/hosts",
            "ip link set lo up",
        ]
        self.run("\n".join(["set -e", *script]))
        self.connect(self.address)

    def connect(self, address: str) -> None:
        """Replace the host's address."""
        self.address = address
        self.run(f"ip addr flush dev eth0; ip addr add {address}/24 dev eth0; ip link set eth0 up")

    def cut(self) -> None:
        """Set the host's link down."""
        self.network.switch("ip", "link", "set", self._link, "down")

    def mend(self) -> None:
        """Set the host's link up."""
        self.network.switch("ip", "link", "set", self._link, "up")

    def limit(self, bits: int | None) -> None:
        """Limit sending and receiving to so many bits a second; None removes the limit."""
        for place in (self.run, self._at_switch):
            device = "eth0" if place == self.run else self._link
            place(f"tc qdisc del dev {device} root 2>/dev/null || true")
            if bits:
                shaped = f"tbf rate {bits}bit burst 16kb latency 400ms"
                place(f"tc qdisc add dev {device} root {shaped}")

    def _at_switch(self, script: str) -> str:
        return self.network.switch("sh", "-c", script)

    def bytes_on_link(self) -> tuple[int, int]:
        """Return the bytes that the host has sent and received."""
        up, down = self.run("awk '/eth0/ {print $10, $2}' /proc/net/dev").split()
        return int(up), int(down)

    def run(self, script: str, timeout: float = 900) -> str:
        """Run a script to its end, in the home directory; return its output."""
        inside = self._inside(script)
        done = subprocess.run(inside, capture_output=True, text=True, timeout=timeout)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {script}\n{done.stdout}{done.stderr}")
        return done.stdout

    def start(self, script: str) -> "Program":
        """Start a process in the background, with its output in a file."""
        log = self._folder / f"log-{len(self._programs)}"
        self._programs.append(Program(self._inside(script), log))
        return self._programs[-1]

    def type(self, text: str) -> str:
        """Run commands as a page prints them; `ssh` and `scp` are emulated."""
        output = ""
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            words = shlex.split(line, comments=True)
            if words[:1] == ["scp"]:
                *sources, target = [word for word in words[1:] if not word.startswith("-")]
                name, _, folder = target.partition(":")
                self._copy(sources, self.network.host_of(name), folder)
            elif words[:3] == ["ssh", "-N", "-L"]:
                self.network.tunnel(self, words[3], self.network.host_of(words[4]))
            elif words[:1] == ["ssh"]:
                output += self.network.host_of(words[1]).run(" ".join(words[2:]))
        if "scp " in text or "ssh " in text:
            return output
        return self.run(text)

    def _copy(self, sources: list[str], other: "Host", folder: str) -> None:
        for source in sources:
            path = Path(source)
            pack = self._inside(f"tar -C {path.parent} -c {path.name}")
            packed = subprocess.run(pack, capture_output=True, check=True).stdout
            subprocess.run(other._inside(f"tar -C {folder} -xp"), input=packed, check=True)

    def _inside(self, script: str) -> list[str]:
        setting = (
            f"export HOME=/root PATH={SCRIPTS}:/usr/sbin:/usr/bin:/sbin:/bin OMP_NUM_THREADS=1 "
            f"PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TERM=dumb COLUMNS=200; {self.network.exports}\ncd"
        )
        return ["nsenter", "-a", "-t", str(self.pid), "bash", "-c", f"{setting}\n{script}"]

    def end(self) -> None:
        """Kill all processes of the host."""
        assert self._process.stdin
        self._process.stdin.close()
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._python is not None:
            self._python.__exit__(None, None, None)
        for program in self._programs:
            program.process.wait()


class Program:
    """A program that was started on a host."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log, self._mark = log, f"PROGRAM={log}".encode()  # in its processes' environment
        with log.open("wb") as file:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                env=os.environ | {"PROGRAM": str(log)}, start_new_session=True,
            )  # fmt: skip

    @property
    def log(self) -> str:
        """Return its output so far."""
        return self._log.read_text(errors="replace")

    def end(self) -> None:
        """Kill the program and all of its processes, without a message to its peers."""
        while found := list(filter(self._started, psutil.pids())):
            for pid in found:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.process.poll()
            time.sleep(0.1)  # a killed process may just have started another
        self.process.wait()

    def _started(self, pid: int) -> bool:
        """Return whether the program started it: nginx has no environment, a fork a new session."""
        with suppress(OSError):  # it has ended
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            return self._mark in environment or os.getsid(pid) == self.process.pid
        return False


class Network(AbstractContextManager["Network"]):
    """Hosts with names, each reached by the others at NAME.example.org."""

    def __init__(
        self, folder: Path, names: list[str], inside: Callable[[int], Any] | None = None
    ) -> None:
        self.folder, self.names = folder, names
        self.app = copy_app(folder / "app")  # the checkout may change meanwhile
        shutil.copytree(ROOT / "deploy", self.app / "deploy")
        if inside is None:
            (self.app / ".venv").symlink_to(sys.prefix)
        else:
            (self.app / ".venv" / "bin").mkdir(parents=True)
        self.inside = inside  # makes the fork server of a host
        self.exports = ""  # the page's exports for every machine
        self.mark = f"{random.randrange(16**5):05x}"
        self.hosts: dict[str, Host] = {}
        self._tunnels: list[subprocess.Popen[bytes]] = []
        self._switch = subprocess.Popen(
            ["unshare", "--net", "--fork", "--kill-child", "cat"],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
        )  # fmt: skip

    def __enter__(self) -> "Network":
        try:
            self._switch_pid = _child_of(self._switch.pid)
            self.switch("ip", "link", "add", "br0", "type", "bridge")
            self.switch("ip", "link", "set", "br0", "up")
            for number, name in enumerate(self.names, 1):
                self.hosts[name] = Host(self, name, number)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for tunnel in self._tunnels:
            tunnel.kill()
            tunnel.wait()
        for host in self.hosts.values():
            host.end()
        assert self._switch.stdin
        self._switch.stdin.close()
        self._switch.kill()
        self._switch.wait()

    def switch(self, *command: str) -> str:
        """Run a command in the bridge's namespace."""
        inside = ["nsenter", "-n", "-t", str(self._switch_pid), *command]
        return subprocess.run(inside, check=True, capture_output=True, text=True).stdout

    def host_of(self, name: str) -> Host:
        """Find a host by its full name."""
        return self.hosts[name.removesuffix(f".{DOMAIN}")]

    def tunnel(self, near: Host, ports: str, far: Host) -> None:
        """Carry connections to a port of `near` to an address of `far`, as ssh -L does."""
        port, target = ports.split(":", 1)
        path = str(self.folder / "tunnel")
        self.relay(far, path, target)
        self.relay(near, f"127.0.0.1:{port}", path)

    def relay(
        self, host: Host, listen: str, target: str, delay: float = 0, loss: float = 0
    ) -> None:
        """Pass connections on from a host, each piece after `delay` s, and lost ones after 1 s."""
        command = [
            sys.executable,
            "-m",
            "tests.support.network",
            listen,
            target,
            str(delay),
            str(loss),
        ]
        inside = ["nsenter", "-n", "-t", str(host.pid), *command]
        self._tunnels.append(subprocess.Popen(inside, cwd=ROOT))
        check = f"ss -Hltx | grep -q {shlex.quote(listen)}"
        deadline = time.monotonic() + 60
        while subprocess.run(["nsenter", "-n", "-t", str(host.pid), "sh", "-c", check]).returncode:
            assert time.monotonic() < deadline, f"no relay at {listen}"
            time.sleep(0.2)


def _child_of(pid: int) -> int:
    """Return the process that `unshare` has started, once its namespaces exist."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        if text and Path(f"/proc/{text[0]}/comm").read_text() == "cat\n":
            return int(text[0])
        time.sleep(0.05)
    raise TimeoutError("unshare started nothing")


async def _relay(listen: str, target: str, delay: float, loss: float) -> None:
    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A piece is sent `delay` after its arrival, in order: the pieces' delays overlap.
        waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()

        async def send() -> None:
            while True:
                due, piece = await waiting.get()
                await asyncio.sleep(max(0.0, due - time.monotonic()))
                if not piece:
                    break
                writer.write(piece)
                await writer.drain()
            writer.close()

        sending = asyncio.create_task(send())
        with suppress(ConnectionError):
            while piece := await reader.read(1400):
                lost = 1.0 if random.random() < loss else 0.0  # sent again by TCP, after a second
                await waiting.put((time.monotonic() + delay + lost, piece))
        await waiting.put((time.monotonic() + delay, b""))
        with suppress(ConnectionError):
            await sending

    async def bridge(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            upstream = await _connect(target)
        except OSError:
            writer.close()
            return
        await asyncio.gather(carry(reader, upstream[1]), carry(upstream[0], writer))

    if ":" in listen:
        host, port = listen.rsplit(":", 1)
        server = await asyncio.start_server(bridge, host, int(port))
    else:
        server = await asyncio.start_unix_server(bridge, listen)
    await server.serve_forever()


async def _connect(target: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if ":" not in target:
        return await asyncio.open_unix_connection(target)
    host, port = target.rsplit(":", 1)
    return await asyncio.open_connection(host, int(port))


if __name__ == "__main__":
    asyncio.run(_relay(sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])))
