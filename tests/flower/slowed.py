"""Limit a device of a deployment to a part of the CPU: stop its processes most of the time.

    with slowed(deployment.folder / "node-2"):
        ...  # each of its processes runs 10 % of the time

In a container cgroups are often read-only; signals always work.
"""

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ravan_flwr.launch.superlink import processes_of
from testing.deployment import with_fork

PERIOD = 1.0  # seconds


@contextmanager
def slowed(home: Path, part: float = 0.1) -> Iterator[None]:
    """Let the device's processes, also new ones, run for `part` of each second."""
    over, known = threading.Event(), set[int]()

    def stop_and_continue() -> None:
        while not over.is_set():
            send(known, signal.SIGSTOP)
            known.update(all_processes_of(home))
            send(known, signal.SIGSTOP)
            over.wait(PERIOD * (1 - part))
            send(known, signal.SIGCONT)
            over.wait(PERIOD * part)

    thread = threading.Thread(target=stop_and_continue)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def frozen(home: Path) -> Iterator[None]:
    """Stop the device's processes."""
    pids = all_processes_of(home)
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


def all_processes_of(home: Path) -> set[int]:
    """Find the processes of a device, with the forks of proxy processes."""
    found = set()
    for pid in processes_of(home):
        found.add(pid)
        for fork in with_fork(pid)[1:]:
            with suppress(psutil.Error):
                children = psutil.Process(fork).children(recursive=True)
                found |= {fork, *(child.pid for child in children)}
    return found


def send(pids: Iterable[int], number: int) -> None:
    """Send a signal to the processes that still run."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
