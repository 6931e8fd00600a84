import pytest

from tests.support.deployment import Deployment


@pytest.fixture(scope="module")
def deployment(request, tmp_path_factory, python):
    """Start a SuperLink for a module's NODES SuperNodes; none of our processes may be left."""
    folder, module = tmp_path_factory.mktemp("deployment"), request.module
    with Deployment(
        folder, module.NODES, behind_proxy=hasattr(module, "PROXY"), scripts=python.scripts
    ) as running:
        yield running
    assert running.left_running == []
