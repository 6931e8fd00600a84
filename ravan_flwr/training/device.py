"""Pick the device and the threads that a process computes with, and look after its memory.

Threads: one core is left to other programs. Every product of a step waits for its slowest thread,
and a thread that shares its core with another busy program is a slow one. On two cores with one
busy program beside it a step of `digits-vit` takes 3.4 times as long with two threads as with one,
a step of a ViT 768 wide 2.3 times; on a quiet machine the second thread makes the first 1.3 times
as quick, and the other 1.5 times (docs/performance.md). So: one thread for small networks, one
less than there are cores for others. A process that is told its cores, as a study tells its runs,
has a thread for each of them and no more. The load of the moment plays no part, since the last
bits of a result depend on the number of threads. Whoever sets `OMP_NUM_THREADS` or
`MKL_NUM_THREADS` has that number; what is no number there is passed over, as the libraries do."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.training.machine import CORES, tell_of_unused_gpus, unused_gpus, usable_cores


def pick_device(device: str) -> torch.device:
    """Find the device: `auto` is the best accelerator at hand; one that is named must be there."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        tell_of_unused_gpus(torch.version.cuda)
        return torch.device("cpu")
    chosen = torch.device(device)
    number = chosen.index or 0
    present = {
        "cpu": True,
        "cuda": number < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }[chosen.type]
    if not present:
        unused = unused_gpus(torch.version.cuda) if chosen.type == "cuda" and not number else None
        raise ValueError(
            f"device = {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; expected one that is; use device=auto or device=cpu"
            + (f". {unused}" if unused else "")
        )
    return chosen


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may take on a device: a GPU's, or the machine's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free = torch.cuda.mem_get_info(device)[0]
    if torch.cuda.get_device_properties(device).is_integrated:  # it has the machine's memory, in
        free = max(free, int(psutil.virtual_memory().available))  # which files are kept as well
    return free + _cached_bytes(device)


def give_back_memory(device: torch.device) -> None:
    """Let other processes have what PyTorch holds and does not use, where they have less of it.

    To take it again costs tens of milliseconds, each time.
    """
    if device.type == "cuda" and _cached_bytes(device) > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()


def _cached_bytes(device: torch.device) -> int:
    """Count the bytes that PyTorch holds and does not use, which this process can have again."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


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
    processes = config.processes or (max(1, cores // alone) if on_cpu else 1)
    number = min(processes, config.at_work_of(num_clients))
    # What a user has set is not divided; `threads` is None then.
    return Workers(number, min(alone, max(1, cores // number)) if threads else alone)
