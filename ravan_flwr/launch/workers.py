"""Start worker processes, hand messages to free workers, and return the replies in order.

The order is that in which the server asks for replies. So the server accumulates them as with one
process, and no reply that was not asked for changes a client's state. Workers compute ahead of the
server, but waiting replies and messages in work are at most twice the number of workers. So memory
does not grow with the number of clients.

`concurrent.futures` and PyTorch's pools end all workers when one ends, and cannot end a worker that
takes too long. Here a single worker ends and is replaced.

Workers start as forks, where that is safe, or as new processes. A fork shares the model and the
examples with the server's process until it writes to them, and starts in a tenth of a second. A new
process imports for five seconds and loads its own model. But a fork has none of its parent's
threads, and would wait for them forever. So forks are only made where clients compute with one
thread on a CPU, and before the server's process computes. A worker that ended is replaced by a new
process.
"""

import gc
import logging
import os
import socket
import subprocess
import sys
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import NoReturn

import psutil
from flwr.app import Context, Error, Message, RecordDict

from ravan_flwr.launch.worker_process import (
    compute_reply,
    leave_signals_to_the_server,
    prepare,
    serve,
)
from ravan_flwr.specs import Scalar

log = logging.getLogger(__name__)

MAX_WAIT = 60.0  # seconds at a time: system timers do not accept arbitrarily long ones
WORKER_ENDED = (
    "the process that computed it ended before it answered; memory that ran out is the usual "
    "reason, and fewer processes at a time, processes=N, need less"
)


@dataclass(frozen=True, eq=False)
class Job:
    """A message, the context of its client, and the deadline of its reply."""

    message: Message
    context: Context
    until: float  # in seconds of time.monotonic

    @property
    def id(self) -> str:
        """Return the id of the message."""
        return self.message.metadata.message_id


class WorkerLink:
    """The connection to a worker, and the process to end with it, if any."""

    def __init__(self, connection: Connection, process: psutil.Process | None = None) -> None:
        self.connection, self._process = connection, process

    def ask(self, job: Job) -> None:
        """Send a message, with the client's context."""
        metadata = job.message.metadata
        self.connection.send(
            (job.message.content, metadata.message_type, metadata.group_id, job.context)
        )

    def answer(self, job: Job) -> tuple[RecordDict | Error, RecordDict]:
        """Return the reply and the client's new state, and log the worker's log lines."""
        content, state, lines = self.connection.recv()
        for name, level, text in lines:
            logging.getLogger(name).log(level, "%s", text)
        # Keep one copy of records that all clients share, as in one process: the fixed tensors.
        sent = {**job.message.content.array_records, **job.context.state.array_records}
        for name, record in list(state.array_records.items()):
            if record == sent.get(name):
                state[name] = sent[name]
        return content, state

    def end(self) -> None:
        """End the worker at once, even amid work: it ends when its connection is closed."""
        self.connection.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()


class WorkerPool:
    """Workers that answer clients' messages, each in the next free worker."""

    def __init__(
        self, number: int, start: Callable[[], WorkerLink], restart: Callable[[], WorkerLink]
    ) -> None:
        """Start up to `number` workers; OSError if none can be started.

        `restart` starts another worker in place of one that ended; it may raise OSError as well.
        """
        self._restart = restart
        self._idle: list[WorkerLink] = []
        self._untried: set[WorkerLink] = set()  # restarted, and without an answer yet
        self._busy: dict[WorkerLink, Job] = {}
        self._ahead: OrderedDict[str, Job] = OrderedDict()  # expected jobs that are not begun
        self._ids: set[str] = set()  # of all expected jobs: waiting, begun or done
        # The reply or its error, and the client's new state; None if the job took too long.
        self._answers: dict[str, tuple[RecordDict | Error, RecordDict] | None] = {}
        for _ in range(number):
            try:
                self._idle.append(start())
            except OSError:
                if not self._idle:
                    raise
        self.processes = len(self)  # that were started

    def __len__(self) -> int:
        return len(self._idle) + len(self._busy)

    def expect(self, jobs: Iterable[Job]) -> None:
        """Set the jobs whose replies will be asked for, in this order, and forget all others."""
        self._ahead = OrderedDict((job.id, job) for job in jobs)
        self._ids = set(self._ahead)
        self._answers = {key: answer for key, answer in self._answers.items() if key in self._ids}
        for begun in (*self._answers, *(job.id for job in self._busy.values())):
            self._ahead.pop(begun, None)

    def answer(self, job: Job) -> Message | None:
        """Wait for a job's reply and return it; None if it did not come in time.

        Without any worker left, the reply is computed in this process.
        """
        if job.id not in self._ids:
            self._ids.add(job.id)
            self._ahead[job.id] = job
        if job.id in self._ahead:
            self._ahead.move_to_end(job.id, last=False)
        while job.id not in self._answers:
            if not len(self):
                late = time.monotonic() >= job.until
                return None if late else compute_reply(job.message, job.context)
            self._hand_out(job)
            self._collect()
        self._ids.discard(job.id)
        answer = self._answers.pop(job.id)
        self._hand_out()  # so workers compute while the server accumulates this reply
        if answer is None:
            return None
        content, job.context.state = answer
        return Message(content, reply_to=job.message)

    def _hand_out(self, awaited_job: Job | None = None) -> None:
        """Give free workers jobs, unless too many replies wait and the awaited job is begun."""
        while self._idle and self._ahead:
            waiting = len(self._answers) + len(self._busy)
            is_awaited = awaited_job is not None and awaited_job.id in self._ahead
            if waiting >= 2 * len(self) and not is_awaited:
                return
            worker, (_, job) = self._idle.pop(), self._ahead.popitem(last=False)
            self._busy[worker] = job
            with suppress(OSError):  # the worker has ended; `_collect` notices it
                worker.ask(job)

    def _collect(self) -> None:
        """Wait for answers of workers, and replace workers that ended or took too long."""
        by_connection = {worker.connection: worker for worker in self._busy}
        left = min(job.until for job in self._busy.values()) - time.monotonic()
        for connection in wait(by_connection, min(max(0.0, left), MAX_WAIT)):
            worker = by_connection[connection]  # type: ignore[index]
            job = self._busy.pop(worker)
            try:
                self._keep(job, worker.answer(job))
                self._untried.discard(worker)
                self._idle.append(worker)
            except (EOFError, OSError, ValueError):
                self._keep(job, (Error(2, WORKER_ENDED), job.context.state))
                self._replace(worker)
        for worker, job in list(self._busy.items()):
            if time.monotonic() >= job.until:
                del self._busy[worker]
                self._keep(job, None)
                self._replace(worker)

    def _keep(self, job: Job, answer: tuple[RecordDict | Error, RecordDict] | None) -> None:
        """Keep an answer until it is asked for, unless its job is not expected any more."""
        if job.id in self._ids:
            self._answers[job.id] = answer

    def _replace(self, worker: WorkerLink) -> None:
        """End a worker, and start another one in its place, unless that one would end as well."""
        worker.end()
        try:
            if worker in self._untried:
                raise OSError("the last one ended before its first answer")
            self._idle.append(self._restart())
            self._untried.add(self._idle[-1])
        except OSError as error:
            log.warning(
                "a process of clients ended, and no other can be started: %s; clients compute in "
                "the remaining ones of %d, or one after the other in the server's",
                *(error, self.processes),
            )

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *self._busy):
            worker.end()


def fork_worker(run_config: Mapping[str, Scalar]) -> WorkerLink:
    """Start a worker as a fork of this process."""
    own_socket, child_socket = socket.socketpair()
    with warnings.catch_warnings():
        # Since 3.12 Python warns if a process with threads forks. Here these are threads of tqdm
        # and of trackers, whose locks a worker does not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if not child:
        _serve_as_fork(child_socket, run_config)
    child_socket.close()
    return WorkerLink(Connection(own_socket.detach()), psutil.Process(child))


def _serve_as_fork(own_socket: socket.socket, run_config: Mapping[str, Scalar]) -> NoReturn:
    try:
        leave_signals_to_the_server()
        gc.freeze()  # keeps the pages of existing objects shared with all workers
        _close_inherited_files(own_socket.fileno())
        prepare(run_config, 1)
        serve(Connection(own_socket.detach()))
    finally:
        os._exit(0)


def _close_inherited_files(own: int) -> None:
    """Redirect the server's open files to /dev/null: the run's lock, other workers' connections.

    The descriptors stay in use, so that a later close of one cannot close another file.
    """
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in [int(path.name) for path in Path("/proc/self/fd").iterdir()]:
        if number > 2 and number not in (nowhere, own):
            with suppress(OSError):  # the descriptor of the folder itself is closed by now
                os.fstat(number)
                os.dup2(nowhere, number, inheritable=False)


def spawn_worker(run_config: Mapping[str, Scalar], threads: int | None) -> WorkerLink:
    """Start a worker as a new process, which imports all packages and loads the model."""
    if sys.platform == "win32":
        raise OSError("it takes sockets that Windows does not have")
    package = str(Path(__file__).resolve().parents[2])
    paths = os.pathsep.join(filter(None, [package, os.environ.get("PYTHONPATH")]))
    own_socket, child_socket = socket.socketpair()
    # -P: import nothing from the working directory, which may be another checkout.
    program = [sys.executable, "-P", "-m", "ravan_flwr.launch.worker_process"]
    with child_socket:
        process = psutil.Popen(
            [*program, str(child_socket.fileno())],
            env=os.environ | {"PYTHONPATH": paths},
            stdin=subprocess.DEVNULL,
            pass_fds=[child_socket.fileno()],
        )
    worker = WorkerLink(Connection(own_socket.detach()), process)
    worker.connection.send((dict(run_config), threads))
    return worker
