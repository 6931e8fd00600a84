"""Hand messages to worker processes as they become free; give their replies back in order.

The order is that in which the server asks for them, so that it folds them as it does with one
process, and what a client keeps is changed by no reply that was not asked for. Workers go ahead of
what was asked for, but replies that wait and messages at work are twice as many as workers at most:
memory does not grow with the number of clients.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

from flwr.app import Context, Error, Message, RecordDict

from ravan_flwr.launch.worker_starts import Starter, WorkerLink
from ravan_flwr.messages.records import receive_records, send_records

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


@dataclass(frozen=True)
class Answer:
    """Hold what a worker sent back."""

    content: RecordDict | Error
    state: RecordDict


class WorkerPool:
    """Let clients answer in workers, each message in the one that is free first."""

    def __init__(self, starter: Starter, number: int) -> None:
        """Start the workers; OSError if not a single one can be started."""
        self._starter = starter
        self._idle: list[WorkerLink] = []
        self._busy: dict[WorkerLink, Job] = {}
        self._ahead: OrderedDict[str, Job] = OrderedDict()  # that no worker has begun
        self._wanted: set[str] = set()  # these jobs, and those that are begun or done
        self._done: dict[str, Answer | None] = {}
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
        ahead = OrderedDict((job.id, job) for job in jobs)
        self._wanted = set(ahead)
        self._done = {key: one for key, one in self._done.items() if key in self._wanted}
        for begun in (*self._done, *(job.id for job in self._busy.values())):
            ahead.pop(begun, None)
        self._ahead = ahead

    def answer(self, job: Job) -> Message | None:
        """Return the reply, as soon as it is there; None if it did not come in time."""
        if job.id not in self._wanted:
            self._wanted.add(job.id)
            self._ahead[job.id] = job
        if job.id in self._ahead:
            self._ahead.move_to_end(job.id, last=False)
        while job.id not in self._done:
            self._hand_out(job)
            self._collect()
        answer = self._done.pop(job.id)
        self._wanted.discard(job.id)
        self._hand_out()  # the workers go on while the server folds this one
        if answer is None:
            return None
        job.context.state = answer.state
        return Message(answer.content, reply_to=job.message)

    def left_over(self, job: Job) -> Message | None:
        """Return a reply that nobody has been given yet, if there is one."""
        answer = self._done.pop(job.id, None)
        return None if answer is None else Message(answer.content, reply_to=job.message)

    def _hand_out(self, asked: Job | None = None) -> None:
        """Give every free worker something to do, as long as not too many replies wait."""
        while self._idle and self._ahead:
            waiting = len(self._done) + len(self._busy)
            is_asked = asked is not None and asked.id in self._ahead
            if waiting >= 2 * len(self) and not is_asked:
                return
            self._ask(self._idle.pop(), self._ahead.popitem(last=False)[1])

    def _ask(self, worker: WorkerLink, job: Job) -> None:
        message, context = job.message, job.context
        question = [message.content, context.state]
        left_out, records = worker.known.leave_out(question)
        worker.known.remember(question)
        header = {
            "kind": message.metadata.message_type,
            "group": message.metadata.group_id,
            "node-id": context.node_id,
            "node-config": dict(context.node_config),
            "run-config": dict(context.run_config),
            "left-out": left_out,
        }
        self._busy[worker] = job
        with suppress(OSError):  # it has ended; that shows where its answer is waited for
            send_records(worker.connection, header, records)

    def _collect(self) -> None:
        """Wait for an answer, a worker's end, or the end of a job's time."""
        workers = {worker.connection: worker for worker in self._busy}
        left = min(job.until for job in self._busy.values()) - time.monotonic()
        for connection in wait(workers, min(max(left, 0.0), LONGEST_WAIT)):
            worker = workers[connection]  # type: ignore[index]
            job = self._busy.pop(worker)
            try:
                self._keep(job, _answer_of(worker))
                self._idle.append(worker)
            except (EOFError, OSError, ValueError):
                self._keep(job, Answer(Error(2, ENDED), job.context.state))
                self._replace(worker)
        for worker, job in list(self._busy.items()):
            if time.monotonic() >= job.until:
                del self._busy[worker]
                self._keep(job, None)
                self._replace(worker)

    def _keep(self, job: Job, answer: Answer | None) -> None:
        """Keep an answer until it is asked for, unless nobody wants it any more."""
        if job.id in self._wanted:
            self._done[job.id] = answer

    def _replace(self, worker: WorkerLink) -> None:
        """Start another worker in place of one that ended, or took too long."""
        worker.end()
        try:
            self._idle.append(self._starter.start())
        except OSError as error:
            log.warning("a process of clients ended, and no other can be started: %s", error)
            if not len(self):
                raise NoWorkersLeftError(
                    f"no process is left for the clients: {error}; make room for more, or set "
                    "processes=1"
                ) from error

    def close(self) -> None:
        """End all workers."""
        for worker in (*self._idle, *self._busy):
            worker.end()
        self._starter.close()


def _answer_of(worker: WorkerLink) -> Answer:
    """Read what a worker sent back, and log what it logged."""
    header, records = receive_records(worker.connection)
    worker.known.put_back(header["left-out"], records)
    for name, level, text in header["log"]:
        logging.getLogger(name).log(level, "%s", text)
    content, state = records
    return Answer(Error(*header["error"]) if "error" in header else content, state)
