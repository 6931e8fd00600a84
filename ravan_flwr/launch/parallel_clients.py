"""Decide how many clients of a run in process compute at a time: in one pass, or in processes.

`processes=N` sets the number. With `auto`, workers are started if they can be forked and the run is
long enough: as many as the cores allow with the usual number of threads of a client. So the results
never depend on the number of processes.
"""

import sys
import threading
from collections.abc import Mapping
from functools import partial
from logging import getLogger

import psutil
import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.launch.workers import WorkerPool, fork_worker, spawn_worker
from ravan_flwr.runs.console import count
from ravan_flwr.specs import Scalar
from ravan_flwr.training.cost import step_operations
from ravan_flwr.training.device import most_workers
from ravan_flwr.training.local_steps import make_training_settings
from ravan_flwr.training.model_and_data import ModelAndData, get_model_and_data
from ravan_flwr.training.together import reason_for_one_by_one

log = getLogger(__name__)

# Parameters times examples, over all steps of a run, from which "auto" starts workers. Less work
# takes a second or two; starting a worker takes a tenth of a second.
MIN_WORK = 10**9

# Floating-point operations of a step that keep a large GPU busy, and the most clients for them.
BUSY, MAX_PER_PASS = 1e11, 32


def start_pool(
    run_config: Mapping[str, Scalar], config: Config, num_clients: int
) -> WorkerPool | None:
    """Start the workers of a run; None if its clients compute one after the other.

    Model and examples are loaded by now; forked workers share them.
    """
    loaded = get_model_and_data(config)
    model = loaded.model
    workers = most_workers(config, num_clients, model.threads, on_cpu=model.device.type == "cpu")
    # Whether a fork of this process can compute: see workers.py. If the machine has an
    # accelerator, PyTorch starts threads for it, even if it is not used.
    may_fork = (
        sys.platform == "linux"
        and workers.threads == 1
        and not torch.accelerator.is_available()
        and threading.current_thread() is threading.main_thread()
    )
    number = workers.number
    if config.processes is None:
        if (config.clients_per_pass or 1) > 1:
            return None
        if not may_fork or _work(config, num_clients, loaded) < MIN_WORK:
            return None
        # As many as fit in memory, if each takes as much as this process.
        have = psutil.Process().memory_info().rss
        number = min(number, 1 + int(psutil.virtual_memory().available // have))
    if number <= 1:
        return None
    # Threads are None if the user has set their number.
    spawn = partial(spawn_worker, run_config, workers.threads if model.threads else None)
    try:
        pool = WorkerPool(number, partial(fork_worker, run_config) if may_fork else spawn, spawn)
    except OSError as error:
        log.warning(
            "clients compute one after the other, since no other process can be started: %s", error
        )
        return None
    log.info(
        "%s at a time, each in a process with %s",
        count(pool.processes, "client"), count(workers.threads, "thread"),
    )  # fmt: skip
    return pool


def clients_per_pass(config: Config, num_clients: int) -> int:
    """Return how many clients train in one pass of a run without workers (training/together.py).

    With `auto`, on a CPU or with a network that keeps a GPU busy, it is one.
    """
    loaded = get_model_and_data(config)
    number, asked = config.clients_per_pass, config.max_concurrent(num_clients)
    if number is None and loaded.model.device.type != "cuda":
        return 1
    if number is None:
        number = min(MAX_PER_PASS, round(BUSY / step_operations(config, 1.0)[1]))
    number = min(number, asked)
    if number <= 1:
        return 1
    steps = make_training_settings(config, 1, config.batch_size)
    reason = reason_for_one_by_one(loaded.model, loaded.task, steps)
    if config.privacy == "example" or config.secure_aggregation:
        reason = "privacy=example and secure-aggregation train each client on its own"
    if reason:
        log.info("clients train one by one, not %d in one pass: %s", number, reason)
        return 1
    log.info("%d clients train in one pass", number)
    return number


def _work(config: Config, num_clients: int, loaded: ModelAndData) -> float:
    """Return the network's parameters times the examples of all steps of the run."""
    steps: float | None = config.local_steps
    if steps is None:  # the mean over clients, from their numbers of examples
        steps = sum(map(config.count_steps, loaded.partition_sizes(num_clients))) / num_clients
    size = sum(parameter.numel() for parameter in loaded.model.network.parameters())
    at_a_time = config.max_concurrent(num_clients)
    return config.num_rounds * at_a_time * steps * config.batch_size * size
