"""Hand out files of tests so that waiting ones and computing ones run side by side.

Tests of deployments wait for processes for most of their time, tests of single parts compute for
all of theirs. In one queue those that wait would hold all workers at once, and the cores would be
idle. So every second worker takes files that wait first, the others take files that compute first,
and each goes on with the other kind when there are no more of its own.

A file stays in one piece, as with `--dist loadfile`: its fixtures are made once.
"""

from xdist.scheduler import LoadFileScheduling
from xdist.workermanage import WorkerController

WAITING = ("tests/flower/", "tests/networks/", "tests/processes/")


def waits(path: str) -> bool:
    """Tell whether the tests of a file wait for processes."""
    return path.startswith(WAITING)


class TwoQueues(LoadFileScheduling):  # type: ignore[misc] # it has no types
    """Give each worker the next file of its kind, or else the next of all."""

    def _assign_work_unit(self, node: WorkerController) -> None:
        # The first one computes: the first file of all (tests/conftest.py) is to be its first.
        patient = self._number(node) % 2 == 1
        for path in self.workqueue:
            if waits(path) == patient:
                self.workqueue.move_to_end(path, last=False)
                break
        super()._assign_work_unit(node)

    @staticmethod
    def _number(node: WorkerController) -> int:
        return int(node.gateway.id.removeprefix("gw"))
