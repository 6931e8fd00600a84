"""The result is delivered to every connected node; a faulty node fails its own delivery alone."""

import re
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras.delivery import server as delivering
from ravan_flwr.extras.delivery.parcel import confirmation, read_parcel, refusal
from ravan_flwr.extras.delivery.server import KIND, NO_RESULT_PATH, NOT_CONNECTED, DeliverAtEnd
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.round import MessageBuilder
from tests import attackers
from tests.attackers import Attacked, Attacker
from tests.hand_made import SUMMARY, Nodes, fake_clock, loaded_of, registered_client

__all__ = ["fake_clock"]

STATE = {"H": torch.arange(24.0).view(6, 2, 2)}


class StoringNodes(Nodes):
    def __init__(self, **kwargs):
        super().__init__(**({"keeps_result": True} | kwargs))
        self.stored = {}

    def answer(self, node, message):
        if message.metadata.message_type != KIND:
            return super().answer(node, message)
        parcel = read_parcel(message.content["config"])
        state = from_record(message.content["arrays"])
        assert checksum(state) == parcel.checksum
        self.stored[node.partition_id] = parcel, state
        return reply_with(message, confirmation(parcel, "adapter"))


def reply_with(message, answer):
    return Message(RecordDict({"kept": ConfigRecord(answer)}), reply_to=message)


@pytest.fixture
def directory(tmp_path):
    run_directory = RunDirectory(tmp_path / "20260101-120000-digits-vit-ravan-seed0")
    run_directory.path.mkdir()
    run_directory.write_json("summary.json", SUMMARY)
    return run_directory


def delivery_of(nodes, **settings):
    config = read_config({"round-timeout": 5.0, **settings})
    client_registry = ClientRegistry(config, loaded_of(), for_training=False)
    client_registry.gather(nodes, wait=True)
    builder = MessageBuilder(client_registry.nodes, None)
    return DeliverAtEnd(nodes, config, client_registry, builder, RunDirectory(Path()), STATE)


def deliver(delivery, directory):
    """Return the summary, to which the delivery has added its keys."""
    delivery.directory, summary = directory, directory.read_summary()
    delivery.deliver(summary)
    return summary


def deliver_to(nodes, directory, **settings):
    summary = deliver(delivery_of(nodes, **settings), directory)
    assert directory.read_summary() == summary
    assert summary.keys() - {"delivered", "not-delivered", "run-id"} == SUMMARY.keys()
    return summary["delivered"], summary["not-delivered"]


def delivered_to(*partitions):
    return [{"partition-id": number, "folder": "adapter"} for number in partitions]


def test_every_node_gets_the_whole_result_whatever_its_budget_fraction(directory):
    nodes = StoringNodes()
    nodes.registered[11] = registered_client(11, 3, budget_fraction=0.01, keeps_result=True)
    # A device that joined after the run had another number of partitions.
    nodes.registered[15] = registered_client(15, 7, num_partitions=9, keeps_result=True)
    assert deliver_to(nodes, directory, method="fedit") == (delivered_to(0, 1, 2, 3, 7), [])
    assert nodes.trained == []
    for parcel, state in nodes.stored.values():
        assert (parcel.run, parcel.last_round) == (directory.path.name, 3)
        assert torch.equal(state["H"], STATE["H"])
        assert parcel.run_summary == SUMMARY
    assert len({parcel.run_id for parcel, _ in nodes.stored.values()}) == 1


def test_runs_of_the_same_name_have_different_ids(directory):
    """Runs with equal summaries differ, too; a later delivery of the same run keeps its id."""
    ids = []
    for is_new in (True, False, True):
        if is_new:
            directory.write_json("summary.json", SUMMARY)
        nodes = StoringNodes()
        deliver_to(nodes, directory)
        ids.append(nodes.stored[0][0].run_id)
    assert ids[0] == ids[1] != ids[2]


def test_clients_without_a_delivery_are_listed_with_the_reason(directory, caplog):
    caplog.set_level("INFO")
    nodes = StoringNodes()
    nodes.registered[12] = registered_client(12, 2, keeps_result=False)
    nodes.registered[14] = registered_client(14, 0, backbone="another", keeps_result=True)
    delivery = delivery_of(nodes)
    away = nodes.registered.pop(11)
    summary = deliver(delivery, directory)
    assert summary["delivered"] == delivered_to(1)
    *missed, refused = [(x["client"], x["reason"]) for x in summary["not-delivered"]]
    expected = f"partition {away.partition_id}", NOT_CONNECTED
    assert missed == [("partition 2", NO_RESULT_PATH), expected]
    assert refused[0] == "node 14"
    assert refused[1].startswith("refused: its backbone has fingerprint another, expected b")
    assert "result delivered to partition 1; 1 without result-path" in caplog.text
    assert "ravan-flwr deliver RUN SUPERLINK" in caplog.text


def test_a_late_training_reply_is_not_taken_for_a_failed_delivery(directory, caplog):
    """It comes while the result is delivered, after a last round that closed without it."""

    class Late(StoringNodes):
        in_process = False

        def pull_messages(self, message_ids):
            yield from super().pull_messages(message_ids)
            if "of round 3" in message_ids:
                question = Message(RecordDict(), 12, "train")
                question.metadata.__dict__["_message_id"] = "of round 3"
                yield Message(RecordDict(), reply_to=question)

    delivery = delivery_of(Late())
    node = delivery.registry.nodes[12]
    node.expect_late("of round 3", node.client, "late: a reply to round 3, which closed after 60 s")
    summary = deliver(delivery, directory)
    assert (summary["delivered"], summary["not-delivered"]) == (delivered_to(0, 1, 2, 3), [])
    assert not node.late
    assert "not delivered" not in caplog.text


def test_a_delivery_to_no_client_is_logged_in_one_line(directory, caplog):
    caplog.set_level("INFO")
    delivered, missed = deliver_to(Nodes(), directory)
    assert (delivered, len(missed)) == ([], 4)
    logged = [line for line in caplog.messages if "deliver" in line]
    assert logged == ["result delivered to no client; 4 without result-path in the node config"]


def test_an_unresponsive_node_is_given_up_after_the_timeout(directory):
    class Sleeps(Attacker):
        kind = KIND

        def replies(self, honest, message):
            return []

    delivered, missed = deliver_to(AttackedKeepers(Sleeps()), directory)
    assert delivered == delivered_to(0, 1, 3)
    assert missed == [{"client": "partition 2", "reason": "no reply within 5 s"}]


def test_the_answer_of_a_node_that_reconnects_is_awaited(directory, monkeypatch):
    monkeypatch.setattr(recruiting, "QUERY_TIMEOUT", 100.0)
    nodes = StoringNodes()
    delivery = delivery_of(nodes)
    late = registered_client(15, 7, num_partitions=9, keeps_result=True)
    nodes.registered[15] = late
    polls = []

    class Slow(type(delivery.registry._inbox)):  # type: ignore[misc]
        def fetch_ready(self, grid, ids):
            polls.append(1)
            return super().fetch_ready(grid, ids) if len(polls) > 3 else iter(())

    delivery.registry._inbox = Slow()
    parcel = delivering.make_parcel(directory, STATE, directory.read_summary())
    answers, _ = delivery._to_all(parcel)
    assert [answers[f"partition {n}"] for n in (0, 1, 2, 3, 7)] == delivered_to(0, 1, 2, 3, 7)
    assert len(answers) == 5


# Attackers: those of training messages whose behaviour does not depend on training, and new ones.

BEFORE = [
    attackers.UnknownQuestion, attackers.NoMessage, attackers.Garbage, attackers.Nested,
    attackers.ForgesALine, attackers.LongReason,
]  # fmt: skip


class Empty(Attacker):
    reason = "missing 'kept'"

    def reply(self, honest, message):
        return Message(RecordDict(), reply_to=message)


class OtherRecords(Attacker):
    reason = "missing 'kept'"

    def reply(self, honest, message):
        return Message(RecordDict({"kept": message.content["arrays"]}), reply_to=message)


class Raises(Attacker):
    reason = "failed with code 2: out of memory"

    def reply(self, honest, message):
        return Message(Error(2, "out of memory"), reply_to=message)


class Reports(Attacker):
    """Change what an honest client confirms, or refuse."""

    def __init__(self, pattern, **changes):
        self.reason, self.changes = pattern, changes  # type: ignore[misc]

    def reply(self, honest, message):
        whole = self.changes if "kept" in self.changes else {}
        return reply_with(message, whole or {**honest.content["kept"], **self.changes})


FULL = "its result-path cannot be written to: No space left on device"
REPORTS = {
    "another state": Reports("reports checksum 'feedfeedfeedfeed', expected", checksum="feed" * 4),
    "a folder elsewhere": Reports(
        r"folder = '../../../root', expected true and one of adapter, merged",
        folder="../../../root",
    ),
    "a full disk": Reports(f"^{FULL}$", **refusal(FULL)),
    "a forged record": Reports(
        r'^\\x1b\[2K"\}\],\\n"delivered": \[\{', kept=False, reason='\x1b[2K"}],\n"delivered": [{'
    ),
    "a long folder": Reports("kept = True, folder = ", folder=["\x1b" * 10] * 100_000),
}


class AttackedKeepers(Attacked, StoringNodes):
    pass


ATTACKERS = {
    **{kind.__name__: kind() for kind in (*BEFORE, Empty, OtherRecords, Raises)},
    **REPORTS,
}


@pytest.mark.parametrize("behaviour", ATTACKERS)
def test_a_hostile_answer_fails_its_own_delivery_alone(behaviour, directory, caplog):
    attacker = ATTACKERS[behaviour]
    attacker.kind = KIND  # type: ignore[misc]
    delivered, (missed,) = deliver_to(AttackedKeepers(attacker), directory)
    assert delivered == delivered_to(0, 1, 3)
    assert missed["client"] == "partition 2"
    assert re.search(attacker.reason, missed["reason"]), missed["reason"]
    assert len(missed["reason"]) <= 500
    assert all("\x1b" not in line and "\n" not in line for line in caplog.messages)


def test_a_duplicate_answer_counts_once(directory):
    attacker = attackers.Doubled()
    attacker.kind = KIND  # type: ignore[misc]
    assert deliver_to(AttackedKeepers(attacker), directory) == (delivered_to(0, 1, 2, 3), [])


# Failed and repeated deliveries.


def test_a_failed_delivery_is_recorded_and_raises_nothing(directory, caplog, monkeypatch):
    def broken(*_):
        raise ConnectionError("nobody\nthere")

    nodes = StoringNodes()
    delivery = delivery_of(nodes)
    monkeypatch.setattr(nodes, "get_node_ids", broken)
    monkeypatch.setattr(nodes, "push_messages", broken)
    summary = deliver(delivery, directory)
    assert directory.read_summary()["delivered"] == []
    assert summary["not-delivered"] == [{"client": "all", "reason": "nobody\\nthere"}]
    assert "the result was not delivered" in caplog.text
    monkeypatch.undo()
    summary = deliver(delivery, directory)
    assert (summary["delivered"], summary["not-delivered"]) == (delivered_to(0, 1, 2, 3), [])


def test_an_invalid_run_name_is_reported(tmp_path, directory, caplog):
    renamed = RunDirectory(directory.path.rename(tmp_path / ".hidden"))
    delivered, missed = deliver_to(StoringNodes(), renamed)
    assert delivered == []
    assert missed[0]["reason"].startswith("the run's name is '.hidden', expected letters, digits")


def test_a_full_disk_after_the_delivery_does_not_make_the_run_fail(directory, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    nodes = StoringNodes()
    delivery = delivery_of(nodes)
    monkeypatch.setattr(RunDirectory, "write_json", full)
    deliver(delivery, directory)
    assert len(nodes.stored) == 4
    assert "the devices that have the result are not in summary.json: [Errno 28]" in caplog.text


def test_later_deliveries_extend_earlier_ones(directory):
    def offer(*numbers, **kwargs):
        nodes = StoringNodes(**kwargs)
        nodes.registered = {k: m for k, m in nodes.registered.items() if m.partition_id in numbers}
        return deliver_to(nodes, directory)

    assert offer(0, 1) == (delivered_to(0, 1), [])
    assert offer(2, keeps_result=False) == (
        delivered_to(0, 1), [{"client": "partition 2", "reason": NO_RESULT_PATH}],
    )  # fmt: skip
    assert offer(2, 3) == (delivered_to(0, 1, 2, 3), [])
    # The device's latest answer counts.
    assert offer(0, keeps_result=False) == (
        delivered_to(1, 2, 3), [{"client": "partition 0", "reason": NO_RESULT_PATH}],
    )  # fmt: skip


def test_a_disconnected_client_keeps_its_delivery(directory):
    nodes = StoringNodes()
    delivery = delivery_of(nodes)
    deliver(delivery, directory)
    del nodes.registered[11], nodes.registered[14]
    summary = deliver(delivery, directory)
    assert (summary["delivered"], summary["not-delivered"]) == (delivered_to(0, 1, 2, 3), [])
