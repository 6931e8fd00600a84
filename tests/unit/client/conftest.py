import pytest
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.client import on_device


@pytest.fixture
def on_a_device(tmp_path, monkeypatch):
    """Be a process that a SuperNode has started, with a folder of its user's."""
    monkeypatch.setattr(on_device, "_folder", lambda: tmp_path / "once")
    monkeypatch.setattr(TaskIdentity, "_task_id", 77)
    return tmp_path / "once"
