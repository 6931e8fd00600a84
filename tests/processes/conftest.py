"""Processes for tests of what a command does, not of how it starts."""

import pytest

from tests.fork_server import LIBRARIES, WITHOUT_HUB, ForkServer


@pytest.fixture(scope="session")
def python():
    """Start commands in processes that have imported every library."""
    with ForkServer(LIBRARIES) as server:
        yield server


@pytest.fixture(scope="session")
def python_without_hub():
    """Start commands in processes that read the hub's settings from their own environment."""
    with ForkServer(WITHOUT_HUB) as server:
        yield server
