"""Schedule test files so that waiting tests and computing tests run at the same time.

Tests of deployments mostly wait for processes, unit tests compute all the time. In one queue,
waiting tests would occupy all workers at once, and the cores would be idle. So every second worker
takes waiting files first, the others take computing files first, and each continues with the other
kind when its own is exhausted.

A file is not split, as with `--dist loadfile`: its fixtures are made once.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = ("tests/flower/", "tests/networks/", "tests/processes/")


def waits(path: str) -> bool:
    """Return whether the tests of a file mostly wait for processes."""
    return path.startswith(WAITING)


class TwoQueues(LoadFileScheduling):  # type: ignore[misc] # it has no types
    """Scheduler that gives each worker the next file of its kind, or else the next of all."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        # Worker 0 computes: it must get the first file of all (tests/conftest.py) first.
        takes_waiting = self._number(node) % 2 == 1
        for path in self.workqueue:
            if waits(path) == takes_waiting:
                self.workqueue.move_to_end(path, last=False)
                break
        super()._assign_work_unit(node)

    @staticmethod
    def _number(node: WorkerController) -> int:
        return int(node.gateway.id.removeprefix("gw"))
