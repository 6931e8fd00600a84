"""A client answers only the kinds of messages that a run of its settings sends."""

import pytest
from flwr.app import Context, Message, RecordDict

from ravan_flwr.client import answers, client_request
from ravan_flwr.client_app import app
from ravan_flwr.launch.worker_process import identify
from ravan_flwr.specs import Scalar

SECURE: dict[str, Scalar] = {"secure-aggregation": True, "clients-per-round": 4}
BY_EXAMPLE = {"privacy": "example", "epsilon": 8.0}


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        # An upload without a mask, and measurements of one client.
        (SECURE, "train"),
        (SECURE, "calibrate"),
        (SECURE, "evaluate"),
        # Results of examples without noise; masks hide an upload, but not a sum.
        (BY_EXAMPLE, "calibrate"),
        (BY_EXAMPLE, "evaluate"),
        (BY_EXAMPLE, "masked"),
        ({}, "masked"),
        ({"privacy": "client", "epsilon": 8.0}, "masked"),
    ],
)
def test_a_message_kind_that_the_run_does_not_send_is_refused(settings, kind, monkeypatch):
    monkeypatch.setattr(client_request, "get_model_and_data", None)  # nothing is loaded for it
    node: dict[str, Scalar] = {"partition-id": 0, "num-partitions": 5}
    context = Context(
        run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config=settings
    )
    with pytest.raises(ValueError, match=f"got a message that asks to {kind!r}, expected"):
        answers.answer(kind, RecordDict(), context)
    assert not context.state


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("got unknown labels c; rename them"), "got unknown labels c; rename them"),
        (RuntimeError("out of memory"), "out of memory"),
        (OSError("no disk"), "OSError: no disk"),
    ],
)
def test_a_node_that_cannot_take_part_answers_its_partition_and_the_reason(
    error, reason, monkeypatch
):
    def fail(*_):
        raise error

    monkeypatch.setattr(client_request, "get_model_and_data", fail)
    identify()
    node: dict[str, Scalar] = {"partition-id": 3, "num-partitions": 5}
    context = Context(run_id=1, node_id=1, node_config=node, state=RecordDict(), run_config={})
    reply = app(Message(RecordDict(), 1, "query"), context)
    assert dict(reply.content.config_records["refused"]) == {"partition-id": 3, "reason": reason}
    with pytest.raises(type(error), match=str(error)):
        app(Message(RecordDict(), 1, "evaluate"), context)
