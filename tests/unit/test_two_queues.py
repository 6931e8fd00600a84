"""Waiting and computing test files run side by side, and every test runs once."""

from types import SimpleNamespace
from typing import Any, cast

from tests.two_queues import TwoQueues, waits

FILES = [
    "tests/runs/test_accelerator.py", "tests/flower/test_a.py", "tests/flower/test_b.py",
    "tests/processes/test_c.py", "tests/properties/test_d.py", "tests/unit/test_e.py",
]  # fmt: skip
TESTS = [f"{path}::test_{number}" for path in FILES for number in range(4)]


class Worker:
    """Act as a worker of pytest-xdist that records the tests sent to it."""

    def __init__(self, number):
        self.gateway = SimpleNamespace(id=f"gw{number}")
        self.shutting_down = False
        self.indices_sent: list[int] = []

    def send_runtest_some(self, indices):
        self.indices_sent += indices

    def shutdown(self):
        self.shutting_down = True

    @property
    def files(self):
        return list(dict.fromkeys(TESTS[index].split("::")[0] for index in self.indices_sent))


def started(number):
    """Return workers that have been sent their first files."""
    options = {"tx": ["popen"] * number}
    config: Any = SimpleNamespace(
        getvalue=options.get, option=SimpleNamespace(loadscopereorder=False)
    )
    queues, workers = TwoQueues(config), [Worker(n) for n in range(number)]
    for worker in workers:
        queues.add_node(cast(Any, worker))
    for worker in workers:
        queues.add_node_collection(cast(Any, worker), TESTS)
    queues.schedule()
    return queues, workers


def test_every_test_runs_once_and_workers_continue_with_the_other_kind():
    for number in (1, 2, 3):
        queues, workers = started(number)
        done: list[int] = []
        for _ in range(len(TESTS)):
            for worker in workers:
                if remaining := [index for index in worker.indices_sent if index not in done]:
                    done.append(remaining[0])
                    queues.mark_test_complete(cast(Any, worker), remaining[0])
        assert sorted(done) == list(range(len(TESTS)))
        kinds = [[waits(path) for path in worker.files] for worker in workers]
        assert all(len(set(kind)) <= 2 for kind in kinds)
        assert workers[0].files[0] == FILES[0]
        assert kinds[0] == sorted(kinds[0])  # computing files first
        if number > 1:
            assert kinds[1][0]
            assert kinds[1] == sorted(kinds[1], reverse=True)
        assert all(worker.shutting_down for worker in workers)
