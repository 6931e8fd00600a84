"""With CI=true a skipped test fails, unless its reason is one of a short list.

Otherwise the tests of a program that could not be installed would be missing from CI unnoticed.
"""

import os
from collections.abc import Generator
from typing import TypeVar

import pytest

NO_GPU = "PyTorch finds no CUDA GPU"
# First words of a reason, and why CI may lack what the test needs.
ALLOWED = {
    NO_GPU: "only of tests marked gpu; CI has none",
    "there is a GPU": "the opposite, where CI runs on a machine with one",
    "root may write anywhere": "a container's user is root",
    "only root can give a folder away": "GitHub's user is not",
    "no namespaces": "neither may a container's root make them; CI's job `networks` does",
    "the reader is in the package's documentation": "a slim image installs no documentation",
}
Report = TypeVar("Report", pytest.TestReport, pytest.CollectReport)


def _checked(report: Report, *, needs_gpu: bool) -> Report:
    """Return the report, as failed if it is of a skip that CI does not allow."""
    # A test that is expected to fail is reported as skipped, too, without a reason in a tuple.
    if not (os.environ.get("CI") and report.skipped and isinstance(report.longrepr, tuple)):
        return report
    path, line, message = report.longrepr
    reason = message.removeprefix("Skipped: ")
    if not reason.startswith(tuple(ALLOWED)) or (reason == NO_GPU and not needs_gpu):
        report.outcome = "failed"
        report.longrepr = (
            f"{path}:{line}: skipped with CI=true: {reason}; expected that it runs. Install what "
            "it needs in .ci/run and .github/workflows/check.yml, or list the reason in "
            "tests/skips.py"
        )
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(
    item: pytest.Item,
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    return _checked((yield), needs_gpu=item.get_closest_marker("gpu") is not None)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    return _checked((yield), needs_gpu=False)
