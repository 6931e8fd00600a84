"""Stop all processes of a device of a deployment.

    with frozen(deployment.folder / "node-2"):
        ...  # none of its processes runs

In a container cgroups are often read-only; signals always work.
"""

import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from ravan_flwr.launch.superlink import list_processes
from tests.support.deployment import with_fork


@contextmanager
def frozen(home: Path) -> Iterator[None]:
    """Stop the device's processes."""
    pids = list_all_processes(home)
    send(pids, signal.SIGSTOP)
    try:
        yield
    finally:
        send(pids, signal.SIGCONT)


def list_all_processes(home: Path) -> set[int]:
    """Find the processes of a device, with the forks of proxy processes."""
    found = set()
    for pid in list_processes(home):
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
