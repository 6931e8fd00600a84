"""Decide how many clients of a run in process work at a time, and let them.

`processes=N` says how many. With `auto` the first client computes in the server's process, as all
do with one. It takes some seconds, and if so many clients are still to come that workers save more
than they cost, they are started: as many as there are cores, given the threads that a client
computes with anyway. So what is computed never depends on what is decided, nor on the load.
"""

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from logging import getLogger

import psutil
import torch
from flwr.app import Message, MessageType

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.worker_process import reply_of
from ravan_flwr.launch.workers import (
    ForkStarter,
    Job,
    NoWorkersLeftError,
    SpawnStarter,
    Starter,
    WorkerPool,
)
from ravan_flwr.runs.console import count
from ravan_flwr.specs import Scalar
from ravan_flwr.training.device import most_workers
from ravan_flwr.training.machine import Gpu, usable_cores, visible_gpus
from ravan_flwr.training.model_and_data import get_model_and_data

log = getLogger(__name__)

# Parameters times examples, of a run's steps all together, for which "auto" gets ready at all: less
# is a second or two. To get ready takes a tenth of a second.
LEAST_WORK = 10**9
LEAST_SAVED = 2.0  # seconds; starting workers takes a tenth of that
ALONE = "clients work one after the other, since no other process can be started: %s"
CROWDED = (
    "%s compute on %s, and each waits for the others: it may be several times slower; set "
    "processes lower or to auto, or unset OMP_NUM_THREADS and MKL_NUM_THREADS"
)
LOCAL_WORK = (MessageType.TRAIN, MessageType.EVALUATE)  # what workers do


class SideBySide:
    """Let clients answer one after the other, or several at a time in worker processes."""

    def __init__(self, run_config: Mapping[str, Scalar], num_clients: int) -> None:
        self._run_config, self._config = run_config, read_config(run_config)
        self._num_clients = num_clients
        self._at_a_time = self._config.at_work_of(num_clients)
        self._cores = usable_cores()  # a wrong number is told before the run has a directory
        self._ready = False
        self._most, self._threads = 1, 1
        self._ahead: dict[str, Job] = {}  # what will be asked for, while no worker is there
        self._starter: Starter | None = None
        self._crew: WorkerPool | None = None
        self.processes = 1  # in which clients computed

    def get_ready(self) -> None:
        """Count the processes that may pay, and get ready to start them; no client has computed.

        Model and examples are there by now, and are shared with workers where they can be.
        """
        if self._ready:
            return
        self._ready = True
        config, model = self._config, get_model_and_data(self._config).model
        on_cpu, given = model.device.type == "cpu", config.processes
        most = most_workers(config, self._num_clients, model.threads, on_cpu=on_cpu)
        self._most, self._threads = most.number, most.threads
        wanted = most.number * most.threads
        if on_cpu and most.number > 1 and most.threads > 1 and wanted > self._cores:
            log.warning(CROWDED, count(wanted, "thread"), count(self._cores, "core"))
        if self._most == 1 or (given is None and self._work < LEAST_WORK):
            return
        try:
            self._starter = self._new_starter(divided=bool(model.threads))
        except OSError as error:
            log.warning(ALONE, error)
        if given is not None and self._starter is not None:
            self._start()

    def _new_starter(self, *, divided: bool) -> Starter | None:
        """Choose how workers start: "auto" does without those that cost much."""
        if self._may_fork:
            return ForkStarter(self._run_config)
        if self._config.processes is None:
            return None
        if sys.platform == "win32":
            raise OSError("it takes sockets that Windows does not have")
        return SpawnStarter(self._run_config, self._threads if divided else None, self._gpus)

    @property
    def _gpus(self) -> list[Gpu]:
        """List the GPUs for workers, if there are several; the server's comes last."""
        on_gpu = get_model_and_data(self._config).model.device.type == "cuda"
        gpus = visible_gpus() if on_gpu and self._config.device in (AUTO, "cuda") else []
        return [*gpus[1:], gpus[0]] if len(gpus) > 1 else []

    @property
    def _work(self) -> float:
        """Multiply the network's parameters by the examples of all steps of the run."""
        config, clients = self._config, self._num_clients
        bench = get_model_and_data(config)
        steps: float | None = config.local_steps
        if steps is None:  # as many as the examples make, in the mean
            steps = sum(map(config.steps_of, bench.partition_sizes(clients))) / clients
        size = sum(parameter.numel() for parameter in bench.model.network.parameters())
        return config.num_rounds * self._at_a_time * steps * config.batch_size * size

    @property
    def _may_fork(self) -> bool:
        """Tell whether a fork of this process can compute: see workers.py.

        Where there is an accelerator, PyTorch starts threads for it, also if it is not used.
        """
        return (
            sys.platform == "linux"
            and self._threads == 1
            and not torch.accelerator.is_available()
            and threading.current_thread() is threading.main_thread()
        )

    def expect(self, jobs: Iterable[Job]) -> None:
        """Let workers go ahead with these, which will be asked for in this order."""
        if self._starter is None:
            return
        self._ahead = {job.id: job for job in jobs if _is_local_work(job)}
        if self._crew is not None:
            self._crew.expect(self._ahead.values())

    def answer(self, job: Job) -> Message | None:
        """Return a client's reply; None if it did not come in time, which only workers can miss."""
        if self._crew is not None and _is_local_work(job):
            try:
                return self._crew.answer(job)
            except NoWorkersLeftError as error:
                log.warning(ALONE, error)
                self.close()
                if time.monotonic() >= job.until:
                    return None
        began = time.perf_counter()
        reply = reply_of(job.message, job.context)
        if self._starter is not None and _is_local_work(job):
            self._ahead.pop(job.id, None)
            self._start_if_it_pays(job, time.perf_counter() - began)
        return reply

    def _start_if_it_pays(self, job: Job, seconds: float) -> None:
        """Start workers if what is left takes long enough, by what one client took."""
        done = int(str(job.message.metadata.group_id or 0))
        left = (self._config.num_rounds - done) * self._at_a_time + len(self._ahead)
        import resource  # noqa: PLC0415 (not there on Windows, where no worker is started)

        # Processes for which there is memory, if each takes what this one took at most.
        peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        most = min(self._most, 1 + int(psutil.virtual_memory().available // peak))
        if left * seconds * (1 - 1 / most) > LEAST_SAVED:
            self._most = most
            self._start()

    def _start(self) -> None:
        assert self._starter is not None
        try:
            self._crew = WorkerPool(self._starter, self._most)
        except OSError as error:
            log.warning(ALONE, error)
            self.close()
            return
        self.processes = len(self._crew)
        self._crew.expect(self._ahead.values())
        log.info(
            "%s at work at a time, each in a process with %s",
            count(self.processes, "client"), count(self._threads, "thread"),
        )  # fmt: skip

    def close(self) -> None:
        """End all processes."""
        crew, starter = self._crew, self._starter
        self._crew = self._starter = None
        if crew is not None:
            crew.close()
        elif starter is not None:
            starter.close()


def _is_local_work(job: Job) -> bool:
    return job.message.metadata.message_type.partition(".")[0] in LOCAL_WORK
