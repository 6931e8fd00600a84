"""Python processes whose imports are done when they start.

Importing torch and transformers takes a process ten seconds of CPU time. A `ForkServer` is a
process that imports them once and forks itself for each command that it is asked for: a process
of its own all the same, which can be killed, signalled and waited for. It has imported libraries
and nothing of `ravan_flwr`, so that a copy of the package in another folder can be run, too.

    with ForkServer(LIBRARIES) as python:
        process = python.start(["-m", "ravan_flwr", "simulate"], log=folder / "log")
        process.send_signal(signal.SIGTERM)
        assert process.wait() == 128 + signal.SIGTERM

Not for tests of the start itself, nor of `processes_of`: a forked process's /proc/PID/environ is
the fork server's.
"""

import gc
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

# Those that read no setting of the Hugging Face Hub when they are imported.
WITHOUT_HUB = [
    "torch", "torch._dynamo", "torch.distributed.tensor", "flwr.app", "flwr.clientapp",
    "flwr.serverapp", "flwr.superlink.grid", "sklearn.datasets", "scipy.optimize", "pandas",
    "pyarrow.parquet", "aiohttp", "fsspec", "matplotlib.figure", "safetensors.torch",
]  # fmt: skip
LIBRARIES = [
    *WITHOUT_HUB, "datasets", "transformers.conversion_mapping", "transformers.loss.loss_utils",
    "transformers.integrations.flash_attention", "transformers.integrations.finegrained_fp8",
    "transformers.models.vit.modeling_vit",
]  # fmt: skip


class ForkServer(AbstractContextManager["ForkServer"]):
    """Starts Python commands in forks of one process that has imported these modules."""

    def __init__(self, modules: Sequence[str]) -> None:
        self._server = subprocess.Popen(
            [sys.executable, __file__, *modules],  # no package: `tests` may be another one, too
            cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self._started: list[Forked] = []
        self._lock = threading.Lock()

    def __exit__(self, *_: object) -> None:
        """Kill what is left of the commands and of what they started; end the server."""
        for process in self._started:
            if process.poll() is None:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        self._server.communicate()

    def start(
        self,
        words: Sequence[str],
        *,
        log: Path,
        errors: Path | None = None,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> "Forked":
        """Run `python` with these words, `-c CODE ...` or `-m MODULE ...`, in its own session."""
        pid = self.ask(
            words=list(words), log=str(log), errors=str(errors or log), folder=str(folder),
            environment=dict(os.environ if environment is None else environment),
        )  # fmt: skip
        self._started.append(Forked(self, pid))
        return self._started[-1]

    def run(
        self,
        words: Sequence[str],
        *,
        environment: Mapping[str, str] | None = None,
        folder: Path = ROOT,
    ) -> subprocess.CompletedProcess[str]:
        """The same, until its end, with what it printed."""
        with tempfile.TemporaryDirectory() as name:
            told, errors = Path(name) / "stdout", Path(name) / "stderr"
            process = self.start(
                words, log=told, errors=errors, environment=environment, folder=folder
            )
            status = process.wait()
            return subprocess.CompletedProcess(
                words, status, told.read_text(errors="replace"), errors.read_text(errors="replace")
            )

    def popen(self, command: Sequence[str], env: Mapping[str, str], **_: Any) -> "Piped":
        """Stand in for `subprocess.Popen(command, env=env, stdout=PIPE, stderr=PIPE)`."""
        assert command[0] == sys.executable
        folder = Path(tempfile.mkdtemp())
        files = folder / "stdout", folder / "stderr"
        return Piped(self.start(command[1:], log=files[0], errors=files[1], environment=env), files)

    def ask(self, **request: Any) -> Any:
        """Send the server a request; its answer."""
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        with self._lock:
            self._server.stdin.write(json.dumps(request).encode() + b"\n")
            self._server.stdin.flush()
            answer = self._server.stdout.readline()
        if not answer:
            raise RuntimeError(f"the fork server ended with {self._server.wait()}; see its output")
        return json.loads(answer)


class Forked:
    """One process of a `ForkServer`, with what a `Popen` can."""

    def __init__(self, server: ForkServer, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._server = server

    def poll(self) -> int | None:
        """Return the exit status, minus the signal if one ended it; None while it runs."""
        if self.returncode is None:
            self.returncode = self._server.ask(ended=self.pid)
        return self.returncode

    def wait(self, timeout: float = 1200.0) -> int:
        """Return the exit status; TimeoutExpired if there is none for so long."""
        deadline = time.monotonic() + timeout
        while (status := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.02)
        return status

    def send_signal(self, number: int) -> None:
        """Send it a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send it SIGTERM."""
        self.send_signal(signal.SIGTERM)


class Piped:
    """A forked process whose output is read when it has ended."""

    def __init__(self, process: Forked, files: tuple[Path, Path]) -> None:
        self._process, self._files = process, files
        self.terminate = process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.returncode

    def communicate(self) -> tuple[str, str]:
        """Wait for its end; return what it printed, and its errors."""
        self._process.wait()
        printed, errors = (file.read_text(errors="replace") for file in self._files)
        return printed, errors


def _serve() -> dict[str, Any] | None:
    """Answer requests until there are no more; in a fork, return its request."""
    while line := sys.stdin.readline():
        request: dict[str, Any] = json.loads(line)
        if "ended" in request:
            pid, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        elif (answer := os.fork()) == 0:
            return request
        os.write(1, json.dumps(answer).encode() + b"\n")
    return None


def _become(request: Mapping[str, Any]) -> None:
    """Be the process that was asked for, as far as it can tell."""
    os.setsid()
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    sys.path[0] = request["folder"]
    for path, number in ((os.devnull, 0), (request["log"], 1), (request["errors"], 2)):
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND
        os.dup2(os.open(path, flags, 0o644), number)
    kind, what, *rest = request["words"]
    if kind == "-m":
        sys.argv = [what, *rest]
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        sys.argv = ["-c", *rest]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(module))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        importlib.import_module(name)
    gc.freeze()  # what is imported stays, in pages that all forks share
    if (asked := _serve()) is not None:
        _become(asked)
