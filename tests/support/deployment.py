"""Start a whole deployment on loopback, with TLS and SuperNode authentication; end every process.

Each machine of a real deployment is a folder here, which is the `FLWR_HOME` of its processes.
By that variable they are found, whichever process started them.

    with Deployment(tmp_path, nodes=3) as deployment:
        for number in range(3):
            deployment.register(number)
            deployment.start_node(number, f"partition-id={number} num-partitions=3")
        run = deployment.run("num-rounds=3")
        deployment.kill_node(1)
        assert run.wait() == "finished:completed"
    assert deployment.left_running == []

With `behind_proxy=True` the server is as in docs/deploy.md: nginx with deploy/reverse-proxy.conf
before the SuperLink, ServerApps in separate processes; devices have only nginx's address.
"""

import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ravan_flwr.launch.superlink import list_processes
from tests.support import ROOT

NAME = "edge"  # of the SuperLink in config.toml
SCRIPTS = Path(sys.executable).parent
TIMEOUT = 120.0  # seconds
ROUNDS_TIMEOUT = 600.0  # seconds for rounds of a run, also on a busy machine
RUN_TIMEOUT = 1200.0  # seconds for a whole run, also on a busy machine
# A SuperLink waits five seconds for a lock of its database, then answers HTTP 500, at which a
# SuperNode ends. On a busy machine a test would wait for that node's reply until the round closes.
_CUSTOMIZE = """
from contextlib import suppress
with suppress(ImportError):
    from flwr.supercore import sql_mixin
    sql_mixin.SQLITE_PRAGMAS = (*sql_mixin.SQLITE_PRAGMAS, ("busy_timeout", "120000"))
"""
SLOW_POLLING = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1.0"}  # of the SuperExec for ServerApps
PENDING_CALLS = 10.0  # seconds for pending calls to end, also on a busy machine
END_TIMEOUT = 120.0  # seconds for processes to end by themselves, before they are killed
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin:/usr/local/sbin")

SERVERAPP = "flwr-serverapp"
# Processes that call the SuperLink periodically.
CALLERS = re.compile("flower-(superexec|supernode)")


class Deployment(AbstractContextManager["Deployment"]):
    """A SuperLink, started on entry, and SuperNodes with keys, none of them registered yet."""

    def __init__(
        self, folder: Path, nodes: int, *, behind_proxy: bool = False, scripts: Path = SCRIPTS
    ) -> None:
        self.folder, self.keys = folder, folder / "keys"
        self._scripts = scripts  # where `python`, `flwr` and Flower's other commands are
        self.left_running: list[str] = []  # our processes that did not end by themselves
        self._held: list[socket.socket] = []
        self._port, self._proxy_port = self._new_port(), self._new_port()
        self.superlink_address = f"127.0.0.1:{self._port}"  # the SuperLink's own, without the proxy
        self.address = f"127.0.0.1:{self._proxy_port}" if behind_proxy else self.superlink_address
        self.behind_proxy = behind_proxy
        # The proxy and the SuperExec for ServerApps.
        self._helpers: list[subprocess.Popen[bytes]] = []
        self._nodes = nodes
        self.app = copy_app(folder / "app")
        self._superlink: subprocess.Popen[bytes] | None = None
        self._supernodes: dict[int, subprocess.Popen[bytes]] = {}
        self.runs: list[Run] = []

    def __enter__(self) -> "Deployment":
        self.make_keys(self._nodes, "--host", "127.0.0.1")
        self.write_config("operator", self.superlink_address)
        try:
            self.start_superlink()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """End everything, with SIGTERM first, the SuperLink last."""
        for run in self.runs:
            run.abandon()
        for number in self._supernodes:
            self.stop_node(number)
        self.stop_superlink()
        with suppress(TimeoutError):
            wait_for(lambda: not self._our_processes(), "our last process to end", END_TIMEOUT)
        for pid in self._our_processes():
            self.left_running.append(_command_line(pid))
            _send(pid, signal.SIGKILL)
        for each in self._held:
            each.close()

    def _new_port(self) -> int:
        """Hold a port until the deployment ends: only a server that reuses addresses gets it.

        So Linux gives it to no connection and to no server that asks for any port.
        """
        held = socket.socket()
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        self._held.append(held)
        return int(held.getsockname()[1])

    def _our_processes(self) -> list[int]:
        """List our warm workers, which end with their owners; kill Flower's processes.

        A process of Flower that calls a node that has ended retries with growing pauses, and ends
        only after them: the tests do not wait for those.
        """
        ours = []
        for pid in list_processes(self.folder):
            if "ravan_flwr.client.warm_worker" in _command_line(pid):
                ours.append(pid)
            else:
                _send(pid, signal.SIGKILL)
        return ours

    def write_config(self, machine: str, address: str) -> None:
        """Configure the `flwr` of a machine with the SuperLink's address."""
        (self._home(machine) / "config.toml").write_text(
            f'[superlink.{NAME}]\naddress = "{address}"\n'
            f'root-certificates = "{self.keys}/authority/ca.crt"\n'
        )

    def make_keys(self, nodes: int, *options: str) -> None:
        """Run `ravan-flwr keys` for this many nodes; existing keys are kept."""
        _command(
            self._environment("operator"), "python", "-m", "ravan_flwr",
            "keys", str(self.keys), "--nodes", str(nodes), *options,
        )  # fmt: skip

    # The SuperLink.

    def start_superlink(self) -> None:
        """Start it, with its database of an earlier start."""
        secrets, home = self.keys / "superlink", self._home("superlink")
        # Not in its working directory, where `PYTHONPATH=.` would find it also behind the proxy.
        customize = home / "customize"
        customize.mkdir(exist_ok=True)
        (customize / "sitecustomize.py").write_text(_CUSTOMIZE)
        path = os.pathsep.join([str(customize), self._environment("superlink")["PYTHONPATH"]])
        self._superlink = self.start(
            "superlink",
            # Not a fork where its log is read: Flower sets the log level when it is imported.
            str(SCRIPTS / "flower-superlink") if self.behind_proxy else "flower-superlink",
            "--enable-supernode-auth",
            "--ssl-ca-certfile", str(secrets / "ca.crt"),
            "--ssl-certfile", str(secrets / "superlink.crt"),
            "--ssl-keyfile", str(secrets / "superlink.key"),
            "--host", "127.0.0.1", "--port", str(self._port),
            "--database", str(home / "state.db"),
            "--isolation", "process" if self.behind_proxy else "subprocess",
            environment=SLOW_POLLING
            # Behind the proxy log every call, also those that are hidden by default; there a test
            # has to see a locked database.
            | ({"FLWR_LOG_LEVEL": "DEBUG"} if self.behind_proxy else {"PYTHONPATH": path}),
        )  # fmt: skip
        context = ssl.create_default_context(cafile=self.keys / "authority" / "ca.crt")

        def is_healthy() -> bool:
            assert self._superlink is not None
            if self._superlink.poll() is not None:
                raise RuntimeError(f"the SuperLink ended: {self.log('superlink')[-2000:]}")
            with suppress(OSError):
                url = f"https://{self.superlink_address}/health"
                with urllib.request.urlopen(url, timeout=1, context=context) as reply:
                    return bool(reply.status == 200)
            return False

        wait_for(is_healthy, "the SuperLink to answer")
        if self.behind_proxy:
            self._start_proxy()
            self.start_serverapps()

    def start_serverapps(self) -> None:
        """Start the SuperExec for ServerApps, which is no child of the SuperLink."""
        command = ["flower-superexec", "--runtime-api-address", self.superlink_address]
        command += ["--root-certificates", str(self.keys / "authority" / "ca.crt")]
        self._helpers.append(self.start("serverapps", *command, environment=SLOW_POLLING))

    @contextmanager
    def only_apps_call(self) -> Iterator[None]:
        """Suspend all SuperExecs and SuperNodes meanwhile, but not the apps that they started."""
        callers = [pid for pid in list_processes(self.folder) if CALLERS.search(_command_line(pid))]
        pids = [pid for caller in callers for pid in with_fork(caller)]
        assert pids
        try:
            for pid in pids:
                _send(pid, signal.SIGSTOP)
            time.sleep(PENDING_CALLS)
            yield
        finally:
            for pid in pids:
                _send(pid, signal.SIGCONT)

    def _start_proxy(self) -> None:
        """Start nginx for devices: deploy/reverse-proxy.conf with this machine's addresses."""
        text, home = (ROOT / "deploy" / "reverse-proxy.conf").read_text(), self._home("proxy")
        for old, new in (
            ("listen 8000 ", f"listen 127.0.0.1:{self._proxy_port} "),
            ("server 127.0.0.1:8001;", f"server {self.superlink_address};"),
            ("/run/credentials/ravan-proxy.service", str(self.keys / "superlink")),
        ):
            assert old in text
            text = text.replace(old, new)
        (home / "reverse-proxy.conf").write_text(text)
        # Started by root, its workers would run as another user, which cannot enter the folder.
        options = [] if os.getuid() else ["-g", "user root;"]
        assert NGINX is not None
        where = ["-p", f"{home}/", "-e", "stderr", "-c", f"{home}/reverse-proxy.conf"]
        command = [NGINX, *where, *options]
        self._helpers.append(self.start("proxy", *command))

        def listens() -> bool:
            if self._helpers[-1].poll() is not None:
                raise RuntimeError(f"the reverse proxy ended: {self.log('proxy')}")
            return _listens(self.address)

        wait_for(listens, "the reverse proxy to listen")

    def health(self) -> int:
        """Run the containers' health check of the SuperLink; return its exit status."""
        check = [sys.executable, str(ROOT / "deploy" / "health.py")]
        health_settings = {
            "HEALTH_URL": f"https://{self.address}/health",
            "HEALTH_CA": str(self.keys / "authority" / "ca.crt"),
        }
        environment = self._environment("operator") | health_settings
        return subprocess.run(check, env=environment, capture_output=True).returncode

    def stop_superlink(self) -> None:
        """End the SuperLink with SIGTERM, after the proxy and the SuperExec."""
        while self._helpers:
            _end(self._helpers.pop())
        _end(self._superlink)

    def kill_superlink(self) -> None:
        """Kill all processes of the SuperLink's machine."""
        self._kill("superlink", self._superlink)
        wait_for(lambda: not _listens(self.superlink_address), "its port to be free")

    def kill_serverapp(self, machine: str) -> None:
        """Kill the processes of the ServerApp that the machine started."""
        pids = [
            pid for pid in list_processes(self._home(machine)) if SERVERAPP in _command_line(pid)
        ]
        assert pids
        for process in (process for pid in pids for process in with_fork(pid)):
            _send(process, signal.SIGKILL)

    # SuperNodes.

    def register(self, number: int) -> int:
        """Register a node's key with the SuperLink; return its node id."""
        key = str(self.keys / f"node-{number}" / "node.pub")
        output = json.loads(self.flwr("supernode", "register", key, NAME, "--format", "json"))
        if "node-id" not in output:  # `flwr` ends with 0 all the same
            raise RuntimeError(f"node {number} was not registered: {output}")
        return int(output["node-id"])

    def unregister(self, node_id: int) -> None:
        """Unregister a node's key; a connected node ends."""
        self.flwr("supernode", "unregister", str(node_id), NAME)

    def listed_nodes(self) -> dict[int, str]:
        """Return node id -> status, of each node of the SuperLink."""
        output = json.loads(self.flwr("supernode", "list", NAME, "--format", "json"))
        return {int(node["node-id"]): node["status"] for node in output["nodes"]}

    def start_node(self, number: int, node_config: str, **environment: str) -> None:
        """Start a SuperNode with that key; see `wait_for_node`."""
        secrets, port = self.keys / f"node-{number}", self._new_port()
        self._supernodes[number] = self.start(
            f"node-{number}",
            "flower-supernode", "--superlink", self.address,
            "--root-certificates", str(secrets / "ca.crt"),
            "--auth-supernode-private-key", str(secrets / "node.key"),
            "--port", str(port), "--node-config", node_config,
            environment=environment,
        )  # fmt: skip

    def start_nodes(
        self, settings: Callable[[int], str] = lambda _: "", **environment: str
    ) -> None:
        """Register and start all SuperNodes, each with another partition; wait for them."""
        for number in range(self._nodes):
            if number not in self._supernodes:
                self.register(number)
            partition = f"partition-id={number} num-partitions={self._nodes} "
            self.start_node(number, partition + settings(number), **environment)
        assert all(self.wait_for_node(number) for number in range(self._nodes))

    def wait_for_node(self, number: int) -> bool:
        """Wait for a node; return whether it connected; its log has the reason if not."""
        process = self._supernodes[number]

        def settled() -> bool:
            return process.poll() is not None or "SuperNode ID: " in self.log(f"node-{number}")

        wait_for(settled, f"node {number} to connect")
        return process.poll() is None

    def is_running(self, number: int) -> bool:
        """Return whether a SuperNode's process is running."""
        return self._supernodes[number].poll() is None

    def stop_node(self, number: int) -> None:
        """End a SuperNode with SIGTERM."""
        _end(self._supernodes[number])

    def kill_node(self, number: int) -> None:
        """Kill all processes of a node's machine, without a message to the SuperLink."""
        self._kill(f"node-{number}", self._supernodes[number])

    # Runs.

    def run(self, run_config: str, app: Path | None = None) -> "Run":
        """Start `flwr run` in the background; the default app writes into a new folder."""
        folder = self.folder / f"run-{len(self.runs)}"
        if app is None:
            app = self.app
            run_config = f"output-dir='{folder}' {run_config}"
        self.runs.append(Run(self, folder, app, run_config))
        return self.runs[-1]

    def deliver(self, run: Path) -> str:
        """Run `ravan-flwr deliver` for a run directory, in the app's folder; return its output."""
        command = ["python", "-m", "ravan_flwr", "deliver", str(run), NAME]
        return _command(self._environment("operator"), *command, folder=self.app)

    def flwr(self, *arguments: str, machine: str = "operator") -> str:
        """Run a `flwr` command as the operator, or on another machine; return its output."""
        return _command(self._environment(machine), "flwr", *arguments)

    # Machines.

    def log(self, machine: str) -> str:
        """Return the log of a machine, such as `superlink` or `node-0`, since its last start."""
        path = self._home(machine) / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def start(
        self,
        machine: str,
        *command: str,
        log: str = "log",
        environment: Mapping[str, str] = MappingProxyType({}),
    ) -> subprocess.Popen[bytes]:
        """Start a command on a machine, with its output in a file."""
        path = self._home(machine) / log
        path.unlink(missing_ok=True)  # an earlier start's processes may still write to the old file
        with path.open("wb") as file:
            return subprocess.Popen(
                command, env={**self._environment(machine), **environment},
                cwd=self._home(machine), stdin=subprocess.DEVNULL, stdout=file,
                stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip

    def _home(self, machine: str) -> Path:
        home = self.folder / machine
        home.mkdir(parents=True, exist_ok=True)
        return home

    def _environment(self, machine: str) -> dict[str, str]:
        return os.environ | {
            "FLWR_HOME": str(self._home(machine)),
            "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
            "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.5",
            "FLWR_TELEMETRY_ENABLED": "0",
            "OMP_NUM_THREADS": "1",  # many processes share few cores
            "PATH": os.pathsep.join([str(self._scripts), os.environ["PATH"]]),
            # `make compat` puts another Flower first on this path.
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", str(ROOT)), str(ROOT)]),
            "PYTHONUNBUFFERED": "1",
        }

    def _kill(self, machine: str, process: subprocess.Popen[bytes] | None) -> None:
        for pid in list_processes(self._home(machine)):
            _send(pid, signal.SIGKILL)
        if process is not None:
            process.wait()


def copy_app(folder: Path) -> Path:
    """Copy the app bundle's files alone: with `.venv` beside them, `flwr run` takes 5 s more."""
    folder.mkdir()
    for name in ("ravan_flwr", "conf"):
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    return folder


class Run:
    """One `flwr run`, from its submission to its end."""

    def __init__(self, deployment: Deployment, folder: Path, app: Path, run_config: str) -> None:
        self.folder, self._deployment = folder, deployment
        self._log_name = f"{folder.name}.log"
        self._process = deployment.start(
            "operator", "flwr", "run", str(app), NAME, "--stream", "-c", run_config,
            log=self._log_name,
        )  # fmt: skip
        self.id = ""

        def started() -> bool:
            found = re.search(r"Successfully started run (\d+)", self.log)
            if found is None and self._process.poll() is not None:
                raise RuntimeError(f"no run began: {self.log}")
            self.id = found[1] if found else ""
            return bool(found)

        wait_for(started, "the run to begin")

    @property
    def log(self) -> str:
        """Return the output of `flwr run --stream` so far."""
        return (self._deployment.folder / "operator" / self._log_name).read_text(errors="replace")

    @property
    def directory(self) -> Path:
        """Return the run directory."""
        (directory,) = self.folder.iterdir()
        return directory

    @property
    def rounds(self) -> list[dict[str, Any]]:
        """Return the records of finished rounds."""
        paths = list(self.folder.glob("*/rounds.jsonl"))
        return [json.loads(line) for path in paths for line in path.read_text().splitlines()]

    @property
    def status(self) -> str:
        """Return the SuperLink's status of the run, such as `running` or `finished:completed`."""
        output = self._deployment.flwr("ls", NAME, "--run-id", self.id, "--format", "json")
        return str(json.loads(output)["runs"][0]["status"])

    def wait(self) -> str:
        """Wait for the end of the run; return its status."""

        def has_ended() -> bool:
            # `--stream` also ends when one of its calls fails; the run continues.
            return self._process.poll() is not None and self.status.startswith("finished")

        self.wait_for(has_ended, "the end of the run", RUN_TIMEOUT)
        return self.status

    def wait_for(self, condition: Callable[[], bool], what: str, timeout: float = TIMEOUT) -> None:
        """Return once the condition holds; the error after `timeout` seconds has the logs' ends."""
        try:
            wait_for(condition, what, timeout)
        except TimeoutError as error:
            machines = sorted(path.parent.name for path in self._deployment.folder.glob("*/log"))
            logs = (f"{name}: {self._deployment.log(name)[-1000:]}" for name in machines)
            raise TimeoutError("\n".join([str(error), self.log[-2000:], *logs])) from None

    def abandon(self) -> None:
        """End `flwr run --stream`; the run ends with the SuperLink."""
        _end(self._process)


def wait_for(
    condition: Callable[[], bool], what: str, timeout: float = TIMEOUT, pause: float = 0.1
) -> None:
    """Return once the condition holds; raise TimeoutError after `timeout` seconds."""
    deadline = time.monotonic() + timeout
    while True:
        started = time.monotonic()
        if condition():
            return
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"waited {timeout:g} s for {what}")
        # A condition that starts a command would occupy a core, if polled without longer pauses.
        time.sleep(max(pause, min(3.0, 2 * (now - started))))


def _command(environment: dict[str, str], *command: str, folder: Path | None = None) -> str:
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        output = done.stdout + done.stderr
        raise RuntimeError(f"{shlex.join(command)} ended with {done.returncode}: {output}")
    return done.stdout


def _listens(address: str) -> bool:
    host, port = address.split(":")
    with suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
        return True
    return False


def _end(process: subprocess.Popen[bytes] | None) -> None:
    if process is None or process.poll() is not None:
        return
    process.terminate()
    try:
        process.wait(END_TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _send(pid: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def with_fork(pid: int) -> list[int]:
    """Return a process, and its fork, if it is the proxy of one (tests/fork_server.py)."""
    with suppress(OSError):
        kind, _, number = Path(f"/proc/{pid}/comm").read_text().partition(" ")
        if kind == "fork":
            return [pid, int(number)]
    return [pid]


def _command_line(pid: int) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()
    return f"process {pid}"
