"""A node serves one run of a series at a time, and carries nothing from one to the next."""

import pytest
import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.client.client_request import read_personal, store_personal
from ravan_flwr.client.replay_guard import enforce_run_scope
from ravan_flwr.client_app import app


@pytest.fixture
def message_of(on_a_device, monkeypatch):
    """Make messages of a run, as a SuperLink does."""
    del on_a_device
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)

    def make(run):
        monkeypatch.setattr(TaskIdentity, "_run_id", run)
        return Message(RecordDict(), 7, "query")

    return make


def context_of(run, state):
    # Flower makes a new context for a new run of a series, with the state of the last.
    return Context(run_id=run, node_id=7, node_config={}, state=state, run_config={}, series_id=11)


def test_the_state_of_a_run_is_removed_in_the_next_run_of_its_series(message_of):
    first = context_of(1, RecordDict())
    enforce_run_scope(message_of(1), first)
    first.state["privacy-account"] = ConfigRecord({"rounds": 5})
    store_personal(first.state, {"B": torch.ones(2)})
    enforce_run_scope(message_of(1), first)
    assert first.state["privacy-account"]["rounds"] == 5
    assert read_personal(first.state) is not None
    second = context_of(2, first.state)
    enforce_run_scope(message_of(2), second)
    assert "privacy-account" not in second.state
    assert read_personal(second.state) is None


def test_every_handler_refuses_a_message_of_the_previous_run(message_of):
    context = context_of(2, RecordDict({"kept": ConfigRecord({"x": 1})}))
    with pytest.raises(ValueError, match="message of run 1 while this node is in run 2"):
        app(message_of(1), context)
    assert "kept" in context.state
