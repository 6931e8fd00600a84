"""Choose the device and the number of threads of a process, and release its cached GPU memory.

Threads: one core is left to other programs. Every product of a step waits for its slowest thread,
and a thread that shares its core with another busy program is slow. Measured on two cores
(benchmarks/results/performance.md), two threads in place of one change the time of a step:

    beside a busy program    `digits-vit` 3.4 times as long, a ViT 768 wide 2.3 times as long
    on an idle machine       `digits-vit` 1.3 times as fast, a ViT 768 wide 1.5 times as fast

So small networks get one thread, and others one less than there are cores. A process whose number
of cores is set (`CORES`), as a study does for its runs, gets one thread per core. The current load
has no influence, since the last bits of a result depend on the number of threads. A number in
`OMP_NUM_THREADS` or `MKL_NUM_THREADS` takes precedence. Any other text there is ignored, as the
libraries do."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import psutil
import torch

from ravan_flwr.config.run_config import Config
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.training.machine import CORES, explain_unused_gpus, log_unused_gpus, usable_cores


def pick_device(device: str) -> torch.device:
    """Return the device; `auto` is the best available. ValueError if a named one is missing."""
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        if torch.backends.mps.is_available():
            return torch.device("mps")
        log_unused_gpus()
        return torch.device("cpu")
    chosen = torch.device(device)
    number = chosen.index or 0
    present = {
        "cpu": True,
        "cuda": number < torch.cuda.device_count(),
        "mps": torch.backends.mps.is_available(),
    }[chosen.type]
    if not present:
        unused = explain_unused_gpus() if chosen.type == "cuda" and not number else None
        raise ValueError(
            f"device = {device!r} is not there: PyTorch sees {torch.cuda.device_count()} CUDA "
            "devices; expected one that is; use device=auto or device=cpu"
            + (f". {unused}" if unused else "")
        )
    return chosen


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process can allocate on a device: a GPU's, or the machine's."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free = torch.cuda.mem_get_info(device)[0]
    if torch.cuda.get_device_properties(device).is_integrated:  # it shares the machine's memory,
        free = max(free, int(psutil.virtual_memory().available))  # part of which caches files
    return free + _cached_bytes(device)


def release_cached_memory(device: torch.device) -> None:
    """Release PyTorch's unused GPU memory if it is more than the GPU's free memory.

    Each later allocation of that memory costs tens of milliseconds.
    """
    if device.type == "cuda" and _cached_bytes(device) > torch.cuda.mem_get_info(device)[0]:
        torch.cuda.empty_cache()


def _cached_bytes(device: torch.device) -> int:
    """Count the bytes that PyTorch has reserved and does not use; this process can reuse them."""
    return torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


_NUMBER = re.compile(r"\s*\+?0*[1-9][0-9]*\s*(,.*)?")  # or a list: OpenMP has one per nesting level
SMALL = 20_000_000  # pretrained parameters times examples in a step's batch


def suitable_threads(size: int, batch_size: int) -> int | None:
    """Return the number of threads for a network of `size` parameters.

    None means that the user has set it in the environment.
    """
    if any(_NUMBER.fullmatch(os.environ.get(name, "")) for name in THREAD_NUMBERS):
        return None
    if size * batch_size <= SMALL:
        return 1
    if os.environ.get(CORES):  # no other program uses this process's cores
        return min(torch.get_num_threads(), usable_cores())
    return max(1, torch.get_num_threads() - 1)


@contextmanager
def computing_with(threads: int | None) -> Iterator[None]:
    """Set PyTorch's number of threads for a `with` block; None leaves it unchanged."""
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
    """The number of processes that compute, and the threads of each."""

    number: int
    threads: int


def most_workers(config: Config, num_clients: int, threads: int | None, *, on_cpu: bool) -> Workers:
    """Return the processes of `processes=N`; with "auto", as many as may make a run faster.

    `threads` is the number for a process that uses the machine alone (`suitable_threads`).
    """
    cores, alone = usable_cores(), threads or torch.get_num_threads()
    processes = config.processes or (max(1, cores // alone) if on_cpu else 1)
    number = min(processes, config.max_concurrent(num_clients))
    # A number that the user has set is not divided; `threads` is then None.
    return Workers(number, min(alone, max(1, cores // number)) if threads else alone)
