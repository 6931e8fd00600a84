"""Give a machine of a deployment a part of a processor: stop all its processes most of the time.

    with slowed(deployment.folder / "node-2"):
        ...  # each of its processes runs a tenth of the time

A container often has no cgroup of its own to write to; signals reach every process.
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
    """Let the machine's processes run in so much of each second, new ones included."""
    over, known = threading.Event(), set[int]()

    def stop_and_go() -> None:
        while not over.is_set():
            send(known, signal.SIGSTOP)
            known.update(everything_of(home))
            send(known, signal.SIGSTOP)
            over.wait(PERIOD * (1 - part))
            send(known, signal.SIGCONT)
            over.wait(PERIOD * part)

    thread = threading.Thread(target=stop_and_go)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


@contextmanager
def frozen(home: Path) -> Iterator[None]:
    """Stop the machine's processes."""
    pids = everything_of(home)
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


def everything_of(home: Path) -> set[int]:
    """Find the processes of a machine, and the forks that some of them stand for."""
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
