"""Start worker processes: as forks, where that is safe, or anew.

A fork shares the model and the examples with the server's process until it writes to them, and it
is there in a tenth of a second; a new process imports for five seconds and has a model of its own.
But a fork has none of its parent's threads, and would wait for them forever. So it is only made
where clients compute with one thread on a CPU, and not of the server's process as it is by then,
but of one that was forked off before any client had computed, has done nothing since, and stands
by for workers to be started, also later in place of one that ended.
"""

import gc
import os
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn, Protocol

from ravan_flwr.launch.worker_process import leave_signals_to_the_server, prepare, serve
from ravan_flwr.messages.records import KnownArrays, send_records
from ravan_flwr.specs import Scalar
from ravan_flwr.training.gpus import VISIBLE, Gpu


class WorkerLink:
    """Hold the connection to a worker process, and a way to end it."""

    def __init__(self, connection: Connection, kill: Callable[[], None]) -> None:
        self.connection, self._kill = connection, kill
        self.known = KnownArrays()

    def end(self) -> None:
        """End it at once, whatever it does."""
        self.connection.close()
        self._kill()


class Starter(Protocol):
    """Start workers."""

    def start(self) -> WorkerLink:
        """Start one more; OSError if the system has no room for it."""

    def close(self) -> None:
        """End all that is left of it."""


class ForkStarter:
    """Start workers as forks of a process that stands by, which is forked off now."""

    def __init__(self, run_config: Mapping[str, Scalar]) -> None:
        # Each question, and each answer, arrives as one.
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            # Since 3.12 Python warns where there are threads: here tqdm's and the trackers', whose
            # locks a worker does not touch.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if not self._process:
            _stand_by(self._ours, theirs, run_config)
        theirs.close()

    def start(self) -> WorkerLink:
        """Ask for one more fork."""
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                socket.send_fds(self._ours, [b"start"], [theirs.fileno()])
            answer = self._ours.recv(64)
        except ConnectionError:  # that process has ended
            answer = b""
        if not answer.isdigit():
            ours.close()
            raise OSError(answer.decode() or "the process that forks workers has ended")
        return WorkerLink(Connection(ours.detach()), lambda: self._kill(answer))

    def _kill(self, process: bytes) -> None:
        """Let its parent kill a worker: to anybody else its number may be another process's."""
        with suppress(OSError):
            self._ours.send(process)

    def close(self) -> None:
        """End the process, and with it all workers."""
        self._ours.close()
        os.waitpid(self._process, 0)


def _stand_by(
    ours: socket.socket, control: socket.socket, run_config: Mapping[str, Scalar]
) -> NoReturn:
    """Be the process that forks workers, until the server's process closes its end."""
    try:
        leave_signals_to_the_server()
        ours.close()
        gc.freeze()  # what is there stays as it is, in pages that all workers share
        _let_go_of_files(control.fileno())
        prepare(run_config, 1)
        _fork_on_demand(control)
    finally:
        os._exit(0)


def _let_go_of_files(*kept: int) -> None:
    """Turn what the server's process has open into nothing: the lock of the run, above all.

    Their numbers stay in use, so that nothing closes another file later.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in (nowhere, *kept):
            with suppress(OSError):  # that of the folder itself is closed by now
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)


def _fork_on_demand(control: socket.socket) -> None:
    children: set[int] = set()
    while True:
        asked, descriptors, _, _ = socket.recv_fds(control, 64, 1)
        children -= set(_ended())
        if asked == b"start":
            try:
                child = os.fork()
            except OSError as error:
                control.send((error.strerror or "fork failed").encode())
            else:
                if not child:
                    control.close()
                    serve(Connection(descriptors[0]))
                children.add(child)
                control.send(str(child).encode())
            os.close(descriptors[0])
        elif asked:
            if int(asked) in children:
                os.kill(int(asked), signal.SIGKILL)
        else:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            return


def _ended() -> list[int]:
    """Take leave of children that have ended."""
    found = []
    with suppress(ChildProcessError):
        while (child := os.waitpid(-1, os.WNOHANG)[0]) > 0:
            found.append(child)
    return found


class SpawnStarter:
    """Start workers as new processes, each of which imports and loads everything."""

    def __init__(
        self, run_config: Mapping[str, Scalar], threads: int | None, gpus: Sequence[Gpu] = ()
    ) -> None:
        """Start them on these GPUs in turn; if there are none, each finds its device by itself."""
        self._run_config, self._threads, self._gpus = dict(run_config), threads, gpus
        self._started: list[tuple[subprocess.Popen[bytes], str]] = []  # and the word for its GPU

    def start(self) -> WorkerLink:
        """Start one more process."""
        at_work = [word for process, word in self._started if process.poll() is None]
        word = min((gpu.uuid for gpu in self._gpus), key=at_work.count, default="")
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        ours, theirs = socket.socketpair()
        with theirs:
            process = subprocess.Popen(
                # -P: not what lies in the working directory, which may be another checkout.
                [
                    sys.executable, "-P", "-m", "ravan_flwr.launch.worker_process",
                    str(theirs.fileno()),
                ],
                env=os.environ | {"PYTHONPATH": paths} | ({VISIBLE: word} if word else {}),
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )  # fmt: skip
        self._started.append((process, word))
        worker = WorkerLink(Connection(ours.detach()), lambda: _end(process))
        header = {"run-config": self._run_config, "threads": self._threads}
        send_records(worker.connection, header, [])
        return worker

    def close(self) -> None:
        """Kill all processes."""
        for process, _ in self._started:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
