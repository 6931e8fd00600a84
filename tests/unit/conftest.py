import gc

import pytest
from flwr.supercore.task_identity import TaskIdentity


@pytest.fixture
def on_a_device(tmp_path, monkeypatch):
    """Pretend to be a process of a SuperNode; return the folder of its persistent state."""
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    monkeypatch.setattr(TaskIdentity, "_task_id", 77)
    return tmp_path / "flwr" / "ravan-flwr" / "once"


@pytest.fixture
def without_collector():
    """Let nothing be freed by Python's collector, which does not know when a GPU is full."""
    gc.disable()
    yield
    gc.enable()
