"""Choose what `make test` runs of the whole suite, by --fast.

- A test that is marked `slow` is left out, but for its first cases: `slow(kept=2)`.
- Of a test with more than eight cases, such as one for every method, the first case and a quarter
  of the others are run. Tests take different quarters, so that together they run every method.
- Tests of single modules (`tests/unit`) run all their cases, which take milliseconds.
"""

import zlib
from collections import defaultdict

import pytest

FEW = 8  # cases of a test that are all run
PART = 4  # of more cases, one in so many is run


def fast_ones(config: pytest.Config, items: list[pytest.Item]) -> list[pytest.Item]:
    """Return the tests of the fast suite, and report the others as deselected."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    kept = {item for name, of_one in cases.items() for item in _kept(name, of_one)}
    config.hook.pytest_deselected(items=[item for item in items if item not in kept])
    return [item for item in items if item in kept]


def _kept(name: str, cases: list[pytest.Item]) -> list[pytest.Item]:
    """Return the cases of one test that the fast suite runs."""
    if (slow := cases[0].get_closest_marker("slow")) is not None:
        return cases[: slow.kwargs.get("kept", 0)]
    turn = zlib.crc32(name.rpartition("::")[2].encode()) % PART
    few = len(cases) <= FEW or name.startswith("tests/unit/")
    return [case for n, case in enumerate(cases) if few or n == 0 or n % PART == turn]
