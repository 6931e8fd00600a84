"""Decide how many clients of a run in process compute at a time, and run them.

`processes=N` sets the number. With `auto`, workers are started if they can be forked and the run is
long enough: as many as the cores allow with the usual number of threads of a client. So the results
never depend on the number of processes.
"""

import sys
import threading
import time
from collections.abc import Iterable, Mapping
from logging import getLogger

import psutil
import torch
from flwr.app import Message, MessageType

from ravan_flwr.config.run_config import Config
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
from ravan_flwr.training.machine import usable_cores
from ravan_flwr.training.model_and_data import get_model_and_data

log = getLogger(__name__)

# Parameters times examples, over all steps of a run, from which "auto" starts workers. Less work
# takes a second or two; starting a worker takes a tenth of a second.
MIN_WORK = 10**9
ONE_AT_A_TIME = "clients compute one after the other, since no other process can be started: %s"
LOCAL_WORK = (MessageType.TRAIN, MessageType.EVALUATE)  # the messages that workers answer


class ParallelClients:
    """Clients that answer one after the other, or several at a time in worker processes."""

    def __init__(self, run_config: Mapping[str, Scalar], config: Config, num_clients: int) -> None:
        self._run_config, self._config, self._num_clients = run_config, config, num_clients
        self._ready = False
        self._pool: WorkerPool | None = None
        self.processes = 1  # number of processes in which clients compute
        usable_cores()  # raises its errors here, before the run has a directory

    def start_workers(self) -> None:
        """Start the workers, if any, before the first client computes.

        Model and examples are loaded by now; forked workers share them.
        """
        if self._ready:
            return
        self._ready = True
        config, model = self._config, get_model_and_data(self._config).model
        on_cpu, clients = model.device.type == "cpu", self._num_clients
        most = most_workers(config, clients, model.threads, on_cpu=on_cpu)
        # Whether a fork of this process can compute: see workers.py. If the machine has an
        # accelerator, PyTorch starts threads for it, even if it is not used.
        may_fork = (
            sys.platform == "linux"
            and most.threads == 1
            and not torch.accelerator.is_available()
            and threading.current_thread() is threading.main_thread()
        )
        number = most.number
        if config.processes is None:
            if not may_fork or self._work < MIN_WORK:
                return
            # As many as fit in memory, if each takes as much as this process.
            have = psutil.Process().memory_info().rss
            number = min(number, 1 + int(psutil.virtual_memory().available // have))
        if number > 1:
            self._start(number, most.threads, may_fork=may_fork)

    def _start(self, number: int, threads: int, *, may_fork: bool) -> None:
        loaded = get_model_and_data(self._config)
        starter: Starter | None = None
        try:
            if may_fork:
                starter = ForkStarter(self._run_config)
            elif sys.platform == "win32":
                raise OSError("it takes sockets that Windows does not have")
            else:
                divided = threads if loaded.model.threads else None  # None: set by the user
                starter = SpawnStarter(self._run_config, divided)
            self._pool = WorkerPool(starter, number)
        except OSError as error:
            log.warning(ONE_AT_A_TIME, error)
            if starter is not None:
                starter.close()
            return
        self.processes = len(self._pool)
        log.info(
            "%s at a time, each in a process with %s",
            count(self.processes, "client"), count(threads, "thread"),
        )  # fmt: skip

    @property
    def _work(self) -> float:
        """Return the network's parameters times the examples of all steps of the run."""
        config, clients = self._config, self._num_clients
        loaded = get_model_and_data(config)
        steps: float | None = config.local_steps
        if steps is None:  # the mean over clients, from their numbers of examples
            steps = sum(map(config.steps_of, loaded.partition_sizes(clients))) / clients
        size = sum(parameter.numel() for parameter in loaded.model.network.parameters())
        at_a_time = config.max_concurrent(clients)
        return config.num_rounds * at_a_time * steps * config.batch_size * size

    def expect(self, jobs: Iterable[Job]) -> None:
        """Let workers begin these jobs, whose replies will be asked for in this order."""
        if self._pool is not None:
            self._pool.expect(filter(_is_local_work, jobs))

    def answer(self, job: Job) -> Message | None:
        """Return a client's reply; None if a worker did not reply in time."""
        if self._pool is not None and _is_local_work(job):
            try:
                return self._pool.answer(job)
            except NoWorkersLeftError as error:
                log.warning(ONE_AT_A_TIME, error)
                self.close()
                if time.monotonic() >= job.until:
                    return None
        return reply_of(job.message, job.context)

    def close(self) -> None:
        """End all processes."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None


def _is_local_work(job: Job) -> bool:
    return job.message.metadata.message_type.partition(".")[0] in LOCAL_WORK
