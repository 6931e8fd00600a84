"""Choose how many threads PyTorch computes with on a CPU; one core is left to other programs.

Every product of a step waits for its slowest thread, and a thread that shares its core with
another busy program is a slow one. On two cores with one busy program beside it a step of
`digits-vit` takes 3.4 times as long with two threads as with one, a step of a ViT 768 wide 2.3
times; on a quiet machine the second thread makes the first 1.3 times as quick, and the other 1.5
times (docs/performance.md). So: one thread for small networks, one less than there are cores for
others. A process that is told its cores, as a study tells its runs, has a thread for each of them
and no more. The load of the moment plays no part, since the last bits of a result depend on the
number of threads. Whoever sets `OMP_NUM_THREADS` or `MKL_NUM_THREADS` has that number; what is no
number there is passed over, as the libraries do.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.training.cores import CORES, usable_cores

_NUMBER = re.compile(r"\s*\+?0*[1-9][0-9]*\s*(,.*)?")  # OpenMP takes a list, too: one by nesting
SMALL = 20_000_000  # pretrained parameters times examples in a step's batch


def suitable_threads(size: int, batch_size: int) -> int | None:
    """Count the threads for a network of so many parameters; None where a number was set."""
    if any(_NUMBER.fullmatch(os.environ.get(name, "")) for name in THREAD_NUMBERS):
        return None
    if size * batch_size <= SMALL:
        return 1
    if os.environ.get(CORES):  # what is left to this process is its own
        return min(torch.get_num_threads(), usable_cores())
    return max(1, torch.get_num_threads() - 1)


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """Compute with so many threads in here, and with as many as before afterwards."""
    if threads is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@dataclass(frozen=True)
class Workers:
    """Say how many processes compute, and with how many threads each."""

    number: int
    threads: int


def most_workers(config: Config, num_clients: int, threads: int | None, *, on_cpu: bool) -> Workers:
    """Count the processes that `processes=N` asks for, and with "auto" those that may pay.

    `threads` are those of a client that has the machine to itself: see `suitable_threads`.
    """
    cores, alone = usable_cores(), threads or torch.get_num_threads()
    wanted = config.processes or (max(1, cores // alone) if on_cpu else 1)
    number = min(wanted, config.at_work_of(num_clients))
    # What a user has set is not divided; `threads` is None then.
    return Workers(number, min(alone, max(1, cores // number)) if threads else alone)
