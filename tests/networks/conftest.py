"""Fixtures: a site of a server, an operator and three devices for each file, and a long run."""

import pytest

from tests.support.network import Network
from tests.support.site import Site


@pytest.fixture(scope="module")
def site(tmp_path_factory, python):
    names = ["server", "operator", *(f"device-{n}" for n in range(3))]
    with Network(tmp_path_factory.mktemp("network"), names, python.inside) as network:
        site = Site(network)
        try:
            site.set_up()
            yield site
        finally:
            site.show_logs()


@pytest.fixture(scope="module")
def run(site):
    """Start a run that continues during the network's faults."""
    run = site.run(1000)
    run.wait_for_rounds(1)
    return run
