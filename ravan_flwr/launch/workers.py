"""Start worker processes, hand them messages as they become free, give the replies back in order.

The order is that in which the server asks for them, so that it accumulates them as it does with one
process, and what a client keeps is changed by no reply that was not asked for. Workers go ahead of
what was asked for, but replies that wait and messages at work are twice as many as workers at most:
memory does not grow with the number of clients.

`concurrent.futures` and PyTorch's pools end all workers when one ends, and cannot end one that
takes too long. Here one worker ends and is replaced.

Workers start as forks, where that is safe, or as new processes. A fork shares the model and the
examples with the server's process until it writes to them, and is there in a tenth of a second; a
new process imports for five seconds and has a model of its own. But a fork has none of its parent's
threads, and would wait for them forever. So it is only made where clients compute with one thread
on a CPU, and not of the server's process as it is by then, but of one that was forked off before
any client had computed, has done nothing since, and stands by for workers to be started, also later
in place of one that ended.
"""

import gc
import logging
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn, Protocol

from flwr.app import Context, Error, Message, RecordDict

from ravan_flwr.launch.worker_process import leave_signals_to_the_server, prepare, serve
from ravan_flwr.specs import Scalar

log = logging.getLogger(__name__)

LONGEST_WAIT = 60.0  # seconds at a time: the system's own timers do not take any number
ENDED = (
    "the process that computed it ended before it answered; memory that ran out is the usual "
    "reason, and fewer processes at a time, processes=N, need less"
)


class NoWorkersLeftError(RuntimeError):
    """Say that the last worker has ended, and no other can be started."""


@dataclass(frozen=True, eq=False)
class Job:
    """Hold a message, whose client it is for, and until when its reply is of use."""

    message: Message
    context: Context
    until: float  # on the clock of time.monotonic

    @property
    def id(self) -> str:
        """Identify it by its message."""
        return self.message.metadata.message_id


class WorkerLink:
    """Hold the connection to a worker, and its process if that is a child of this one."""

    def __init__(
        self, connection: Connection, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.connection, self._process = connection, process

    def ask(self, job: Job) -> None:
        """Send a message, with the client's context."""
        metadata = job.message.metadata
        self.connection.send(
            (job.message.content, metadata.message_type, metadata.group_id, job.context)
        )

    def answer(self, job: Job) -> tuple[RecordDict | Error, RecordDict]:
        """Receive the reply and what the client keeps, and log what the worker has logged."""
        content, state, lines = self.connection.recv()
        for name, level, text in lines:
            logging.getLogger(name).log(level, "%s", text)
        # What all clients keep is kept once, as in one process: the fixed tensors.
        sent = {**job.message.content.array_records, **job.context.state.array_records}
        for name, record in list(state.array_records.items()):
            if record == sent.get(name):
                state[name] = sent[name]
        return content, state

    def end(self) -> None:
        """End it at once, whatever it does: a worker ends when its connection does."""
        self.connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class Starter(Protocol):
    """Start workers."""

    def start(self) -> WorkerLink:
        """Start one more; OSError if the system has no room for it."""

    def close(self) -> None:
        """End all that is left of it."""


class WorkerPool:
    """Let clients answer in workers, each message in the one that is free first."""

    def __init__(self, starter: Starter, number: int) -> None:
        """Start the workers; OSError if not a single one can be started."""
        self._starter = starter
        self._idle: list[WorkerLink] = []
        self._busy: dict[WorkerLink, Job] = {}
        self._ahead: OrderedDict[str, Job] = OrderedDict()  # that no worker has begun
        self._ids: set[str] = set()  # of these jobs, and of begun or done ones
        # The reply, or its error, and what the client keeps; None of one that took too long.
        self._answers: dict[str, tuple[RecordDict | Error, RecordDict] | None] = {}
        self._problem: OSError | None = None  # why the last was not replaced
        for _ in range(number):
            try:
                self._idle.append(starter.start())
            except OSError:
                if not self._idle:
                    raise

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Be ready to be asked for these, in this order, and for no others."""
        self._ahead = OrderedDict((job.id, job) for job in jobs)
        self._ids = set(self._ahead)
        self._answers = {key: answer for key, answer in self._answers.items() if key in self._ids}
        for begun in (*self._answers, *(job.id for job in self._busy.values())):
            self._ahead.pop(begun, None)

    def answer(self, job: Job) -> Message | None:
        """Return the reply, as soon as it is there; None if it did not come in time.

        NoWorkersLeftError if there is no worker that could compute it.
        """
        if job.id not in self._ids:
            self._ids.add(job.id)
            self._ahead[job.id] = job
        if job.id in self._ahead:
            self._ahead.move_to_end(job.id, last=False)
        while job.id not in self._answers:
            if not len(self):
                raise NoWorkersLeftError(
                    f"no process is left for the clients: {self._problem}; make room for more, or "
                    "set processes=1"
                )
            self._hand_out(job)
            self._collect()
        self._ids.discard(job.id)
        answer = self._answers.pop(job.id)
        self._hand_out()  # the workers go on while the server accumulates this one
        if answer is None:
            return None
        content, job.context.state = answer
        return Message(content, reply_to=job.message)

    def _hand_out(self, awaited_job: Job | None = None) -> None:
        """Give every free worker something to do, as long as not too many replies wait."""
        while self._idle and self._ahead:
            waiting = len(self._answers) + len(self._busy)
            is_awaited = awaited_job is not None and awaited_job.id in self._ahead
            if waiting >= 2 * len(self) and not is_awaited:
                return
            worker, (_, job) = self._idle.pop(), self._ahead.popitem(last=False)
            self._busy[worker] = job
            with suppress(OSError):  # it has ended, which is seen where its answer is awaited
                worker.ask(job)

    def _collect(self) -> None:
        """Wait for workers that answer, and replace those that ended or took too long."""
        by_connection = {worker.connection: worker for worker in self._busy}
        left = min(job.until for job in self._busy.values()) - time.monotonic()
        for connection in wait(by_connection, min(max(0.0, left), LONGEST_WAIT)):
            worker = by_connection[connection]  # type: ignore[index]
            job = self._busy.pop(worker)
            try:
                self._keep(job, worker.answer(job))
                self._idle.append(worker)
            except (EOFError, OSError, ValueError):
                self._keep(job, (Error(2, ENDED), job.context.state))
                self._replace(worker)
        for worker, job in list(self._busy.items()):
            if time.monotonic() >= job.until:
                del self._busy[worker]
                self._keep(job, None)
                self._replace(worker)

    def _keep(self, job: Job, answer: tuple[RecordDict | Error, RecordDict] | None) -> None:
        """Keep an answer until it is asked for, unless nobody wants it any more."""
        if job.id in self._ids:
            self._answers[job.id] = answer

    def _replace(self, worker: WorkerLink) -> None:
        """Start another worker in place of one that ended, or took too long."""
        worker.end()
        try:
            self._idle.append(self._starter.start())
        except OSError as error:
            self._problem = error
            log.warning("a process of clients ended, and no other can be started: %s", error)

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._starter.close()


class ForkStarter:
    """Start workers as forks of a process that stands by, which is forked off now."""

    def __init__(self, run_config: Mapping[str, Scalar]) -> None:
        # Each question, and each answer, arrives as one.
        self._socket, child_socket = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with warnings.catch_warnings():
            # Since 3.12 Python warns where there are threads: here tqdm's and the trackers', whose
            # locks a worker does not touch.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process = os.fork()
        if not self._process:
            self._socket.close()
            _stand_by(child_socket, run_config)
        child_socket.close()

    def start(self) -> WorkerLink:
        """Ask for one more fork."""
        own_socket, child_socket = socket.socketpair()
        answer = b""
        with child_socket, suppress(ConnectionError):  # that process has ended
            socket.send_fds(self._socket, [b"start"], [child_socket.fileno()])
            answer = self._socket.recv(64)
        if answer != b"started":
            own_socket.close()
            raise OSError(answer.decode() or "the process that forks workers has ended")
        return WorkerLink(Connection(own_socket.detach()))

    def close(self) -> None:
        """End the process, and with it all workers."""
        self._socket.close()
        os.waitpid(self._process, 0)


def _stand_by(control: socket.socket, run_config: Mapping[str, Scalar]) -> NoReturn:
    """Be the process that forks workers, until the server's process closes its end."""
    try:
        os.setpgrp()  # to be ended with all workers, also one that was stopped
        leave_signals_to_the_server()
        gc.freeze()  # what is there stays as it is, in pages that all workers share
        _let_go_of_files(control.fileno())
        prepare(run_config, 1)
        while True:
            request, descriptors, _, _ = socket.recv_fds(control, 64, 1)
            if not request:
                os.killpg(0, signal.SIGKILL)
            try:
                child = os.fork()
            except OSError as error:
                control.send((error.strerror or "fork failed").encode())
            else:
                if not child:
                    control.close()
                    serve(Connection(descriptors[0]))
                control.send(b"started")
            os.close(descriptors[0])
            with suppress(ChildProcessError):  # take leave of those that have ended
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
    finally:
        os._exit(0)


def _let_go_of_files(*descriptors: int) -> None:
    """Turn what the server's process has open into nothing: the lock of the run, above all.

    Their numbers stay in use, so that nothing closes another file later.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in (nowhere, *descriptors):
            with suppress(OSError):  # that of the folder itself is closed by now
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)


class SpawnStarter:
    """Start workers as new processes, each of which imports and loads everything."""

    def __init__(self, run_config: Mapping[str, Scalar], threads: int | None) -> None:
        self._first = dict(run_config), threads

    def start(self) -> WorkerLink:
        """Start one more process."""
        package = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
        own_socket, child_socket = socket.socketpair()
        # -P: not what lies in the working directory, which may be another checkout.
        program = [sys.executable, "-P", "-m", "ravan_flwr.launch.worker_process"]
        with child_socket:
            process = subprocess.Popen(
                [*program, str(child_socket.fileno())],
                env=os.environ | {"PYTHONPATH": paths},
                stdin=subprocess.DEVNULL,
                pass_fds=[child_socket.fileno()],
            )
        worker = WorkerLink(Connection(own_socket.detach()), process)
        worker.connection.send(self._first)
        return worker

    def close(self) -> None:
        """Do nothing: nothing is left beside the workers, which the pool ends."""
