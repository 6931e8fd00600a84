"""Python processes whose imports are done when they start.

Importing torch and transformers takes a process ten seconds of CPU time. A `ForkServer` is a
process that imports them once and forks itself for each command. It imports libraries and nothing
of `ravan_flwr`, so that it can also run a copy of the package in another folder.

    with ForkServer(ALL) as python:
        process = python.start(["-m", "ravan_flwr", "simulate"], log=folder / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM

It imports at the first request. All workers of pytest-xdist share one server, through a `Python`
with its folder, and are forks themselves (`pytest-worker`): else their imports would take most of
the time of collecting the tests. A server may be a fork of another one, `ForkServer(ALL, base)`:
it then imports only the modules that `base` lacks. `python.inside(pid)` is a server in the
namespaces of a process, for a host of tests/support/network.py.

`python.executable` replaces `sys.executable`; the same folder has replacements of `flwr` and
Flower's other commands. Each is a small proxy process (tests/forked.py), which forwards signals to
the fork, ends with the fork's status, and kills the fork when it is killed itself. So it is found
by its environment and command line, as an ordinary process is; CPU time and memory are the fork's.

Tests of the start itself, or of the imports, must not use it.
"""

import atexit
import ctypes
import fcntl
import functools
import gc
import importlib
import logging
import marshal
import os
import runpy
import select
import selectors
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent
COMMANDS = [
    "flwr", "flwr-clientapp", "flwr-serverapp", "flwr-simulation", "flower-superexec",
    "flower-superlink", "flower-supernode", "ravan-flwr",
]  # fmt: skip
WORKER = "pytest-worker"  # replaces the Python of pytest-xdist's workers
LISTENER = 0  # the descriptor of the listener in a server that is a fork of another one
MOST_FILES = 253  # that Linux passes in one message
NAMESPACES = ("net", "uts", "pid", "mnt")
KILL = signal.SIGRTMAX  # which the proxy forwards as SIGKILL to the fork

# Modules that read no setting of the Hugging Face Hub when they are imported.
WITHOUT_HUB = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "flwr.app", "flwr.clientapp",
    "flwr.serverapp", "flwr.superlink.grid", "sklearn.datasets", "scipy.optimize", "pandas",
    "pyarrow.parquet", "aiohttp", "fsspec", "matplotlib.figure", "safetensors.torch",
]  # fmt: skip
LIBRARIES = [
    *WITHOUT_HUB, "datasets", "transformers.conversion_mapping", "transformers.loss.loss_utils",
    "transformers.integrations.flash_attention", "transformers.integrations.finegrained_fp8",
    "transformers.models.vit.modeling_vit",
    # Flower's commands.
    "flwr.superlink.cli.flower_superlink", "flwr.supernode.cli.flower_supernode",
    "flwr.supernode.cli.flwr_clientapp", "flwr.supercore.superexec.run_superexec",
    "flwr.simulation.app", "flwr.server.superlink.fleet.vce.vce_api", "typer.rich_utils",
    "rich.markdown",
]  # fmt: skip
HAS_GPU = shutil.which("nvidia-smi") is not None
# And what tests import themselves, except on a machine with a GPU: importing bitsandbytes, which
# PEFT does, initialises CUDA, which a fork cannot use.
ALL = LIBRARIES if HAS_GPU else [
    *LIBRARIES, "bitsandbytes", "dp_accounting", "flwr_datasets", "hypothesis", "opacus", "peft",
    "seaborn", "tensorboardX", "torchmetrics",
]  # fmt: skip


class Python(AbstractContextManager["Python"]):
    """Starts Python commands in forks of the server that listens in the folder `scripts`."""

    def __init__(self, scripts: Path) -> None:
        self.scripts = scripts
        self.executable = str(scripts / "python")
        self._started: list[Forked] = []

    def __exit__(self, *_: object) -> None:
        """End the commands that still run."""
        for process in self._started:
            process.kill()
            process.wait()

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> "Forked":
        """Start `python` with these arguments, in a new session."""
        with log.open("ab") as out, (errors or log).open("ab") as stderr:
            process = Forked(
                [self.executable, *words], env=environment, cwd=folder, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=out, stderr=stderr,
            )  # fmt: skip
        self._started.append(process)
        return process

    def run(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """Run `python` with these arguments to its end; return status and output."""
        return subprocess.run(
            [self.executable, *words], env=environment, cwd=folder, capture_output=True,
            text=True, errors="replace", stdin=subprocess.DEVNULL,
        )  # fmt: skip

    def inside(self, host: int) -> "ForkServer":
        """Make a server in the namespaces of a process, in which its forks are as well."""
        return ForkServer([], self, host)


class ForkServer(Python):
    """Owns a server process that has imported `modules`; it is a fork of `base`, if given."""

    def __init__(self, modules: Sequence[str], base: Python | None = None, host: int = 0) -> None:
        super().__init__(Path(tempfile.mkdtemp(prefix="forked-")))
        text = (ROOT / "tests" / "forked.py").read_text()
        for name in ("python", WORKER, *COMMANDS):
            (self.scripts / name).write_text(f"#!{os.path.realpath(sys.executable)} -IS\n{text}")
            (self.scripts / name).chmod(0o755)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.scripts / "socket"))
        self._listener.listen(64)  # requests before the end of the imports wait
        self._server = self._fresh(modules) if base is None else self._forked(modules, base, host)

    def _fresh(self, modules: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a new process, which ends when its standard input is closed."""
        number = self._listener.fileno()
        return subprocess.Popen(
            [sys.executable, __file__, str(number), *modules],  # no package: `tests` may be another
            cwd=ROOT, stdin=subprocess.PIPE, pass_fds=[number], start_new_session=True,
        )  # fmt: skip

    def _forked(self, modules: Sequence[str], base: Python, host: int) -> subprocess.Popen[bytes]:
        """Let `base` fork it, which passes on the three standard files only."""
        return Forked(
            [str(base.scripts / WORKER), __file__, f"{LISTENER}@{host}", *modules],
            cwd=ROOT, stdin=self._listener.fileno(), start_new_session=True,
        )  # fmt: skip

    def __exit__(self, *_: object) -> None:
        """End the server and the commands that still run."""
        super().__exit__()
        if self._server.stdin is None:
            self._server.kill()
        self._server.communicate()
        self._listener.close()
        shutil.rmtree(self.scripts)


def fork_of(pid: int) -> int:
    """Return the fork of a proxy process, once the proxy's name is set."""
    ends = time.monotonic() + 300
    while not (name := Path(f"/proc/{pid}/comm").read_text()).startswith("fork "):
        assert time.monotonic() < ends, name
        time.sleep(0.01)
    return int(name.removeprefix("fork "))


class Forked(subprocess.Popen[bytes]):
    """The proxy process of a fork; a kill goes to the fork, which has ended when `wait` returns."""

    def send_signal(self, number: int) -> None:
        super().send_signal(KILL if number == signal.SIGKILL else number)


# The server's side.

Request = dict[str, Any]


class _Server:
    """Forks for each connection, which lasts as long as the fork."""

    def __init__(self, listener: socket.socket, end: Sequence[Any]) -> None:
        self._listener = listener
        self._forks: dict[int, socket.socket] = {}  # connections, by the process id of the fork
        self._ended, self._wakeup = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        for source in (self._ended, self._wakeup):
            source.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self._wakeup.fileno())
        for source, action in (
            (listener, self._accept), (self._ended, self._report_ends),
            *((source, sys.exit) for source in end),
        ):  # fmt: skip
            self._selector.register(source, selectors.EVENT_READ, action)

    def serve(self) -> Request:
        """Fork for each request; return it in the fork, and never in the server."""
        while True:
            for key, _ in self._selector.select():
                if request := key.data():
                    self._leave()
                    return dict(request)

    def _leave(self) -> None:
        """Close the server's files in a fork."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._selector.close()
        for resource in (self._listener, self._ended, self._wakeup, *self._forks.values()):
            resource.close()

    def _accept(self) -> Request | None:
        connection, _ = self._listener.accept()
        head, files, _, _ = socket.recv_fds(connection, 4, MOST_FILES)
        length = int.from_bytes(head, "little")
        received = connection.recv(length, socket.MSG_WAITALL)
        if received and len(received) == length:  # else the client was killed before
            pid = os.fork()
            if pid == 0:
                connection.close()
                request: Request = marshal.loads(received)
                return request | {"files": dict(zip(request["files"], files, strict=True))}
            self._send_number(connection, pid)
            self._forks[pid] = connection
            action = functools.partial(self._pass_on, pid)
            self._selector.register(connection, selectors.EVENT_READ, action)
        for file in files:
            os.close(file)
        return None

    def _pass_on(self, pid: int) -> None:
        """Send a fork the signals that its client received; kill it if the client has ended."""
        if pid not in self._forks:
            return  # it has just ended
        numbers = b""
        with suppress(ConnectionError):
            numbers = self._forks[pid].recv(16)
        if not numbers:
            self._selector.unregister(self._forks[pid])
        for number in numbers or [KILL]:
            os.kill(pid, signal.SIGKILL if number == KILL else number)

    def _report_ends(self) -> None:
        """Send the statuses of ended forks to their clients."""
        self._ended.recv(1024)
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            with self._forks.pop(pid) as connection:
                with suppress(KeyError):
                    self._selector.unregister(connection)
                self._send_number(connection, os.waitstatus_to_exitcode(status))

    def _send_number(self, connection: socket.socket, number: int) -> None:
        with suppress(OSError):  # the client was killed
            connection.sendall(struct.pack("i", number))


def _move(host: int) -> None:
    """Continue in a child in the namespaces of process `host`: network, files and so on."""
    libc = ctypes.CDLL(None, use_errno=True)
    spaces = [os.open(f"/proc/{host}/ns/{kind}", os.O_RDONLY) for kind in NAMESPACES]
    for space in spaces:
        if libc.setns(space, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(space)
    if child := os.fork():  # a process cannot change its own process id
        os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) & 255)
    libc.prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG


def _become(request: Request, paths: list[str]) -> None:
    """Turn this fork into the requested process."""
    os.setsid()
    ctypes.CDLL(None).prctl(1, signal.SIGKILL, 0, 0, 0)  # PR_SET_PDEATHSIG: end with the server
    given: dict[int, int] = request["files"]
    # First to numbers above 256, so that no file overwrites another.
    moved = {number: fcntl.fcntl(file, fcntl.F_DUPFD, 256) for number, file in given.items()}
    for file in given.values():
        os.close(file)
    for number, file in moved.items():
        os.dup2(file, number)
        os.close(file)
    for number in request["ignored"]:
        signal.signal(number, signal.SIG_IGN)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    tempfile.tempdir = None  # as TMPDIR has it now
    if os.environ.get("PYTHONUNBUFFERED"):
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    places = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[:] = [*filter(None, places), *paths]
    sys.orig_argv = request["words"]
    called, *words = request["words"]
    if Path(called).name == "flwr":  # it reads ports from the environment when it is imported
        for name in [name for name in sys.modules if name.startswith("flwr.cli.")]:
            del sys.modules[name]
    if Path(called).name != WORKER:  # which starts processes with the real Python
        os.getppid = lambda: int(request["parent"])
        sys.executable = str(Path(called).with_name("python"))
        if called != sys.executable:
            words = [str(SCRIPTS / Path(called).name), *words]
    if places != [""]:
        sys.modules.pop("sitecustomize", None)
        with suppress(ImportError):
            importlib.import_module("sitecustomize")
    os._exit(_status_of(words))  # skips the interpreter's teardown, which takes half a second


def _status_of(words: list[str]) -> int:
    """Run a command and the interpreter's steps at its end; return the exit status."""
    status = 0
    try:
        _run(words)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
        if isinstance(end.code, str):
            sys.stderr.write(end.code + "\n")
    except BaseException as error:  # noqa: BLE001 (as Python does)
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            status = 128 + signal.SIGINT
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):
            stream.flush()
    return status


def _run(words: list[str]) -> None:
    """Run a module, a program text or a file, as Python's command line does."""
    safe = False
    while words[0] in ("-P", "-u"):
        safe |= words.pop(0) == "-P"
    kind, *rest = words
    if not safe:
        sys.path.insert(0, {"-m": str(Path.cwd()), "-c": ""}.get(kind, str(Path(kind).parent)))
    if kind == "-m":
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    elif kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(rest[0], "<string>", "exec"), vars(module))
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


if __name__ == "__main__":
    (number, _, host), modules = sys.argv[1].partition("@"), sys.argv[2:]
    base, listener = sys.path[1:], socket.socket(fileno=int(number))
    if int(host or 0):
        _move(int(host))
    end = [] if int(number) == LISTENER else [sys.stdin]
    if listener not in select.select([listener, *end], [], [])[0]:
        sys.exit()  # no request came
    logging.disable()  # libraries log what is not installed when they are imported
    with warnings.catch_warnings(record=True):  # and restore the filters of a new Python
        for name in modules:
            importlib.import_module(name)
    logging.disable(logging.NOTSET)
    logging.root.handlers.clear()  # a library adds one: each line would be written twice
    gc.freeze()  # imported objects stay in pages that all forks share
    _become(_Server(listener, end).serve(), base)
