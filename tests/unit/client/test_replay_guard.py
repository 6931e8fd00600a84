"""A node answers each request once, also if several processes start at the same time."""

import pytest
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.client import replay_guard
from ravan_flwr.client.replay_guard import ACCOUNT
from ravan_flwr.config.node_config import Node
from ravan_flwr.extras.example_privacy.account import check_account_is_kept


@pytest.fixture
def ask(on_a_device):
    """Return a function that asks a node with the earlier state, as parallel processes do."""
    del on_a_device

    def send_request(kind, partition=0, run=5, rounds=0, **settings):
        state = RecordDict({ACCOUNT: ConfigRecord({"rounds": rounds})})
        context = Context(
            run_id=run, node_id=1, node_config={}, state=state, run_config={"privacy": "example"}
        )
        content = RecordDict({"config": ConfigRecord(settings)})
        replay_guard.answer_once(kind, content, context, partition)

    return send_request


def test_a_phase_is_answered_once_and_in_order(ask):
    for number in (1, 2):
        for kind in ("keys", "shares", "masked", "agree", "unmask"):
            ask(kind, round=number)
            with pytest.raises(ValueError, match="what this node does once"):
                ask(kind, round=number)
    with pytest.raises(ValueError, match="what this node does once"):
        ask("agree", round=2)
    ask("agree", round=2, run=6)
    ask("agree", round=2, partition=1)


def test_of_two_simultaneous_private_rounds_one_is_answered(ask):
    ask("train", **{"earlier-rounds": 0})
    with pytest.raises(ValueError, match="asked at the same time"):
        ask("train", **{"earlier-rounds": 0})
    ask("train", rounds=1, **{"earlier-rounds": 1})
    ask("train", rounds=0, **{"earlier-rounds": 2})  # its state was lost
    ask("train", rounds=9, **{"earlier-rounds": 0})


def test_in_a_simulation_nothing_is_written(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(TaskIdentity, "_task_id", 0)
    for _ in range(2):
        ask("agree", round=1)
    monkeypatch.setattr(TaskIdentity, "_task_id", None)
    ask("agree", round=1)
    monkeypatch.setattr(TaskIdentity, "_task_id", 77)
    ask("query")
    assert not list(tmp_path.iterdir())


def test_its_folder_is_private_to_the_user_and_is_kept(ask, on_a_device):
    ask("agree", round=1)
    for folder in (on_a_device, on_a_device.parent):
        assert oct(folder.stat().st_mode)[-3:] == "700"
    assert len(list(on_a_device.iterdir())) == 1


def test_an_incomplete_line_lowers_no_number(ask, on_a_device):
    ask("agree", round=20)
    (file,) = on_a_device.iterdir()
    file.write_bytes(file.read_bytes() + b"1")  # the beginning of 103
    with pytest.raises(ValueError, match="what this node does once"):
        ask("agree", round=2)
    ask("agree", round=21)
    with pytest.raises(ValueError, match="what this node does once"):
        ask("agree", round=21)


@pytest.mark.parametrize("broken", ["a file", "open to others", "a file in its way"])
def test_an_unusable_flower_home_is_replaced_by_the_runtime_folder(
    ask, on_a_device, tmp_path, monkeypatch, caplog, broken
):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "session"))
    (tmp_path / "session").mkdir(mode=0o700)
    home = on_a_device.parent
    if broken == "a file in its way":
        home.parent.write_text("not a folder")
    else:
        home.parent.mkdir()
        if broken == "a file":
            home.write_text("not a folder")
        else:
            home.mkdir()
            home.chmod(0o755)
    with pytest.raises(ValueError, match="cannot keep what it spends"):
        check_account_is_kept(Node(0, 1, max_epsilon=2.0))
    check_account_is_kept(Node(0, 1))
    ask("agree", round=1)
    assert "lost with its temporary files" in caplog.text
    assert len(list((tmp_path / "session" / "ravan-flwr" / "once").iterdir())) == 1
    with pytest.raises(ValueError, match="what this node does once"):
        ask("agree", round=1)
