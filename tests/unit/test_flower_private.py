"""Each use of Flower's private parts by itself: a failure shows which one Flower changed."""

import re
import subprocess
import sys

import httpx
import pytest
from flwr.app import ArrayRecord, Message, RecordDict

from ravan_flwr import flower_private as private
from tests import ROOT

PUBLIC = {"flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy", "flwr"}


def test_the_package_uses_no_other_private_part():
    for path in (ROOT / "ravan_flwr").rglob("*.py"):
        if path.name == "flower_private.py":
            continue
        used = set(re.findall(r"^\s*(?:from|import) (flwr(?:\.\w+)*)", path.read_text(), re.M))
        assert used <= PUBLIC, f"{path}: {used - PUBLIC} belongs into flower_private.py"


def test_an_unset_task_identity_raises():
    """client/on_device.py concludes from it that no SuperNode started the process."""
    code = (
        "from flwr.supercore.task_identity import TaskIdentity\n"
        "try: print(TaskIdentity.task_id)\nexcept RuntimeError: print('none')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "none\n", done.stderr


def test_the_small_parts_exist(monkeypatch, tmp_path):
    """Whether a run is a simulation, a run and the nodes of a grid, and the caught exceptions."""
    assert len({private.TaskType.SIMULATION, private.TaskType.SERVER_APP}) == 2
    run = private.Run.create_empty(3)
    assert run.run_id == 3
    assert hasattr(run, "primary_task_type")
    node = private.NodeInfo(node_id=7)
    assert (node.node_id, node.last_activated_at) == (7, "")
    assert issubclass(private.RunNotRunningException, BaseException)
    assert issubclass(private.ObjectPushError, Exception)
    assert private.ObjectPushError.__init__.__code__.co_argcount >= 1
    monkeypatch.setenv("FLWR_HOME", str(tmp_path))  # where a device's privacy account is kept
    assert private.flower_home() == tmp_path


def test_the_grid_assembles_replies_by_the_patched_function(monkeypatch):
    """server/superlink_calls.py checks sizes first."""
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
    from flwr.superlink.grid import http_grid

    source = http_grid.__loader__.get_source(http_grid.__name__)  # type: ignore[union-attr]
    assert source is not None
    assert "inflate_object_from_contents(" in source
    name = "inflate_object_from_contents"
    monkeypatch.setattr(http_grid, name, getattr(http_grid, name))
    calls = []
    private.check_before_inflating(lambda contents: calls.append(dict(contents)))
    record = RecordDict({"a": ArrayRecord()})
    contents = {key: one.deflate() for key, one in get_all_nested_objects(record).items()}
    inflate = http_grid.inflate_object_from_contents  # type: ignore[attr-defined]
    inflated = inflate(record.object_id, dict(contents))
    assert inflated.object_id == record.object_id
    assert calls == [contents]


def test_the_grid_repeats_calls_by_an_invoker():
    """server/superlink_calls.py lets it repeat more calls, until its own deadline."""
    from flwr.superlink.grid import HttpGrid

    grid = HttpGrid("http://127.0.0.1:9", token="a")
    invoker = private.find_retry_invoker(grid)
    assert {"should_giveup", "on_backoff", "max_time"} <= set(vars(invoker))
    assert private.find_retry_invoker(object()) is None
    refused = httpx.HTTPStatusError(
        "", request=httpx.Request("POST", "http://a"), response=httpx.Response(500)
    )
    assert invoker.should_giveup(refused) is True


def test_a_node_config_is_parsed_as_by_the_supernode():
    """launch/doctor.py."""
    text_ = 'partition-id=0 data-path="/a b" budget=0.5 warm-worker=true'
    assert private.parse_node_config(text_) == {
        "partition-id": 0, "data-path": "/a b", "budget": 0.5, "warm-worker": True,
    }  # fmt: skip
    for text in ("partition-id=0 data-path=/srv/data", "missing.toml"):
        with pytest.raises(ValueError, match="expected KEY=VALUE pairs, with texts in quotation"):
            private.parse_node_config(text)


def test_a_message_is_made_outside_of_a_run():
    """Everywhere: `Message` requires the run's ids to be set."""
    private.TaskIdentity.task_id = 8
    assert private.TaskIdentity.task_id == 8
    private.TaskIdentity.run_id = private.TaskIdentity.node_id = private.TaskIdentity.task_id = 1
    message = Message(RecordDict(), 5, "train")
    assert message.metadata.dst_node_id == 5
    private.set_message_id(message, "an id")
    assert message.metadata.message_id == "an id"
    with pytest.raises(ValueError, match="Invalid message type"):
        Message(RecordDict(), 5, "nonsense")
