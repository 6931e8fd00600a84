"""The result goes to every node that is there; one that lies, fails or is silent loses its own."""

import re
from pathlib import Path

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from ravan_flwr.config.run_config import read_config
from ravan_flwr.extras import delivery as delivering
from ravan_flwr.extras.delivery import KIND, NO_RESULT_PATH, NOT_CONNECTED, DeliverAtEnd
from ravan_flwr.messages.arrays import from_record
from ravan_flwr.messages.parcel import confirmation, read_parcel, refusal
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server.client_registry import ClientRegistry
from ravan_flwr.server.reply_collector import MessageBuilder
from ravan_flwr.server.status import Status
from tests import attackers
from tests.attackers import Attacked, Attacker
from tests.hand_made import SUMMARY, Nodes, impatient, loaded_of, registered_client

__all__ = ["impatient"]

STATE = {"H": torch.arange(24.0).view(6, 2, 2)}


class Keepers(Nodes):
    """Nodes that keep what they are sent, in memory."""

    def __init__(self, **named):
        super().__init__(**({"keeps_result": True} | named))
        self.shelves = {}

    def answer(self, node, message):
        if message.metadata.message_type != KIND:
            return super().answer(node, message)
        parcel = read_parcel(message.content["config"])
        state = from_record(message.content["arrays"])
        assert checksum(state) == parcel.checksum
        self.shelves[node.partition_id] = parcel, state
        return reply_with(message, confirmation(parcel, "adapter"))


def reply_with(message, answer):
    return Message(RecordDict({"kept": ConfigRecord(answer)}), reply_to=message)


@pytest.fixture
def directory(tmp_path):
    made = RunDirectory(tmp_path / "20260101-120000-digits-vit-ravan-seed0")
    made.path.mkdir()
    made.write_json("summary.json", SUMMARY)
    return made


def delivery_of(nodes, **settings):
    config = read_config({"round-timeout": 5.0, **settings})
    client_registry = ClientRegistry(config, loaded_of(), for_training=False)
    client_registry.gather(nodes, wait=True)
    message_builder = MessageBuilder(client_registry.nodes, None)
    given = client_registry, message_builder, Status(client_registry, report=None)
    return DeliverAtEnd(nodes, config, *given, RunDirectory(Path()), STATE)


def deliver(delivery, directory, summary):
    delivery.directory = directory
    delivery.deliver(summary)


def hand_to(nodes, directory, **settings):
    summary = directory.read_summary()
    deliver(delivery_of(nodes, **settings), directory, summary)
    written = directory.read_summary()
    assert written == summary
    assert written.keys() - {"delivered", "not-delivered", "run-id"} == SUMMARY.keys()
    return written["delivered"], written["not-delivered"]


def having(*partitions):
    return [{"partition-id": number, "folder": "adapter"} for number in partitions]


def test_everybody_gets_all_of_it_whatever_the_budget(directory):
    nodes = Keepers()
    nodes.registered[11] = registered_client(11, 3, budget_fraction=0.01, keeps_result=True)
    assert hand_to(nodes, directory, method="fedit") == (having(0, 1, 2, 3), [])
    assert nodes.trained == []
    for parcel, state in nodes.shelves.values():
        assert (parcel.run, parcel.last_round) == (directory.path.name, 3)
        assert torch.equal(state["H"], STATE["H"])
        assert parcel.run_summary == SUMMARY
    assert len({parcel.run_id for parcel, _ in nodes.shelves.values()}) == 1


def test_a_run_is_told_from_another_of_the_same_name(directory):
    """Also where all that happened was the same; what it delivers again is known by its id."""
    ids = []
    for is_new in (True, False, True):
        if is_new:
            directory.write_json("summary.json", SUMMARY)
        nodes = Keepers()
        hand_to(nodes, directory)
        ids.append(nodes.shelves[0][0].run_id)
    assert ids[0] == ids[1] != ids[2]


def test_who_wants_none_who_is_away_and_who_is_refused_is_named(directory, caplog):
    caplog.set_level("INFO")
    nodes = Keepers()
    nodes.registered[12] = registered_client(12, 2, keeps_result=False)
    nodes.registered[14] = registered_client(14, 0, backbone="another", keeps_result=True)
    delivery = delivery_of(nodes)
    away = nodes.registered.pop(11)
    summary = directory.read_summary()
    deliver(delivery, directory, summary)
    assert summary["delivered"] == having(1)
    assert [one["client"] for one in summary["not-delivered"]] == [
        "partition 2", f"partition {away.partition_id}", "node 14",
    ]  # fmt: skip
    reasons = [one["reason"] for one in summary["not-delivered"]]
    assert reasons[0] == NO_RESULT_PATH
    assert reasons[1] == NOT_CONNECTED
    assert reasons[2].startswith("refused: its backbone has fingerprint another, expected b")
    assert "result delivered to partition 1; 1 without result-path" in caplog.text
    assert "ravan-flwr deliver RUN SUPERLINK" in caplog.text


def test_nobody_takes_it_in_one_line(directory, caplog):
    caplog.set_level("INFO")
    delivered, missed = hand_to(Nodes(), directory)
    assert (delivered, len(missed)) == ([], 4)
    told = [line for line in caplog.messages if "deliver" in line]
    assert told == ["result delivered to no client; 4 without result-path in the node config"]


def test_a_silent_node_is_waited_for_so_long_and_no_longer(directory):
    class Sleepers(Keepers):
        def pull_messages(self, message_ids):
            return [r for r in super().pull_messages(message_ids) if not self.is_silent(r)]

        def is_silent(self, reply):
            node = self.registered[reply.metadata.src_node_id]
            return reply.metadata.message_type == KIND and node.partition_id == 2

    delivered, missed = hand_to(Sleepers(), directory)
    assert delivered == having(0, 1, 3)
    assert missed == [{"client": "partition 2", "reason": "no reply within 5 s"}]


def test_a_node_that_comes_back_just_then_is_waited_for(directory, monkeypatch):
    monkeypatch.setattr(recruiting, "QUERY_TIMEOUT", 100.0)
    nodes = Keepers()
    delivery = delivery_of(nodes)
    late = registered_client(15, 7, num_partitions=9, keeps_result=True)
    nodes.registered[15] = late
    looks = []

    class Slow(type(delivery.registry._inbox)):  # type: ignore[misc]
        def fetch_ready(self, grid, ids):
            looks.append(1)
            return super().fetch_ready(grid, ids) if len(looks) > 3 else iter(())

    delivery.registry._inbox = Slow()
    have, _ = delivery._to_all(parcel_of(directory))
    assert [have[f"partition {n}"] for n in (0, 1, 2, 3, 7)] == having(0, 1, 2, 3, 7)
    assert len(have) == 5


def parcel_of(directory):
    return delivering.make_parcel(directory, STATE, directory.read_summary())


# Nodes that mean harm: those of training messages that say nothing of training, and others.

BEFORE = [
    attackers.UnknownQuestion, attackers.NoMessage, attackers.Garbage, attackers.Nested,
    attackers.ForgesALine, attackers.LongReason,
]  # fmt: skip


class Empty(Attacker):
    told = "missing 'kept'"

    def reply(self, honest, message):
        return Message(RecordDict(), reply_to=message)


class OtherRecords(Attacker):
    told = "missing 'kept'"

    def reply(self, honest, message):
        return Message(RecordDict({"kept": message.content["arrays"]}), reply_to=message)


class AnotherState(Attacker):
    told = "it reports checksum 'feedfeedfeedfeed', expected"

    def reply(self, honest, message):
        honest.content["kept"]["checksum"] = "feed" * 4
        return honest


class FolderElsewhere(Attacker):
    told = r"folder = '../../../root', expected true and one of adapter, merged"

    def reply(self, honest, message):
        honest.content["kept"]["folder"] = "../../../root"
        return honest


class FullDisk(Attacker):
    told = "^its result-path cannot be written to: No space left on device$"

    def reply(self, honest, message):
        told = refusal("its result-path cannot be written to: No space left on device")
        return reply_with(message, told)


class ForgesARecord(Attacker):
    told = r'^\\x1b\[2K"\}\],\\n"delivered": \[\{'

    def reply(self, honest, message):
        return reply_with(message, {"kept": False, "reason": '\x1b[2K"}],\n"delivered": [{'})


class LongFolder(Attacker):
    told = "kept = True, folder = "

    def reply(self, honest, message):
        honest.content["kept"]["folder"] = ["\x1b" * 10] * 100_000
        return honest


class Raises(Attacker):
    told = "failed with code 2: out of memory"

    def reply(self, honest, message):
        return Message(Error(2, "out of memory"), reply_to=message)


class AttackedKeepers(Attacked, Keepers):
    pass


NEW = [
    Empty, OtherRecords, AnotherState, FolderElsewhere, FullDisk, ForgesARecord, LongFolder, Raises,
]  # fmt: skip


@pytest.mark.parametrize("behaviour", [*BEFORE, *NEW], ids=lambda one: one.__name__)
def test_a_hostile_answer_costs_its_own_entry(behaviour, directory, caplog):
    attacker = behaviour()
    attacker.kind = KIND
    delivered, missed = hand_to(AttackedKeepers(attacker), directory)
    assert delivered == having(0, 1, 3)
    ((one),) = missed
    assert one["client"] == "partition 2"
    assert re.search(attacker.told, one["reason"]), one["reason"]
    assert len(one["reason"]) <= 500
    assert all("\x1b" not in line and "\n" not in line for line in caplog.messages)


def test_two_answers_count_once(directory):
    attacker = attackers.Doubled()
    attacker.kind = KIND  # type: ignore[misc]
    assert hand_to(AttackedKeepers(attacker), directory) == (having(0, 1, 2, 3), [])


# A delivery that fails, and one after another.


def test_a_delivery_that_fails_is_told_and_raises_nothing(directory, caplog, monkeypatch):
    def broken(*_):
        raise ConnectionError("nobody\nthere")

    nodes = Keepers()
    delivery = delivery_of(nodes)
    monkeypatch.setattr(nodes, "get_node_ids", broken)
    monkeypatch.setattr(nodes, "push_messages", broken)
    summary = directory.read_summary()
    deliver(delivery, directory, summary)
    assert directory.read_summary()["delivered"] == []
    assert summary["not-delivered"] == [{"client": "all", "reason": "nobody\\nthere"}]
    assert "the result was not delivered" in caplog.text
    monkeypatch.undo()
    deliver(delivery, directory, summary)
    assert (summary["delivered"], summary["not-delivered"]) == (having(0, 1, 2, 3), [])


def test_a_name_that_no_device_can_have_is_told(tmp_path, directory, caplog):
    renamed = RunDirectory(directory.path.rename(tmp_path / ".hidden"))
    delivered, missed = hand_to(Keepers(), renamed)
    assert delivered == []
    assert missed[0]["reason"].startswith("the run's name is '.hidden', expected letters, digits")


def test_a_full_disk_after_the_delivery_does_not_make_the_run_fail(directory, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    nodes = Keepers()
    delivery = delivery_of(nodes)
    monkeypatch.setattr(RunDirectory, "write_json", full)
    deliver(delivery, directory, directory.read_summary())
    assert len(nodes.shelves) == 4
    assert "the devices that have the result are not in summary.json: [Errno 28]" in caplog.text


def test_later_deliveries_add_to_the_earlier_ones(directory):
    def offer(*numbers, **named):
        nodes = Keepers(**named)
        nodes.registered = {k: m for k, m in nodes.registered.items() if m.partition_id in numbers}
        return hand_to_again(nodes, directory)

    assert offer(0, 1) == (having(0, 1), [])
    assert offer(2, keeps_result=False) == (
        having(0, 1), [{"client": "partition 2", "reason": NO_RESULT_PATH}],
    )  # fmt: skip
    assert offer(2, 3) == (having(0, 1, 2, 3), [])
    # What a device says now counts, whatever it had.
    assert offer(0, keeps_result=False) == (
        having(1, 2, 3), [{"client": "partition 0", "reason": NO_RESULT_PATH}],
    )  # fmt: skip


def test_who_had_it_and_is_away_has_it_still(directory):
    summary = directory.read_summary()
    nodes = Keepers()
    delivery = delivery_of(nodes)
    deliver(delivery, directory, summary)
    del nodes.registered[11], nodes.registered[14]
    deliver(delivery, directory, summary)
    assert (summary["delivered"], summary["not-delivered"]) == (having(0, 1, 2, 3), [])


def hand_to_again(nodes, directory):
    summary = directory.read_summary()
    deliver(delivery_of(nodes), directory, summary)
    return summary["delivered"], summary["not-delivered"]


def test_nodes_that_share_the_data_otherwise_get_it_as_well(directory):
    """A device that came when the run had ended was told of other numbers of partitions."""
    nodes = Keepers()
    nodes.registered[15] = registered_client(15, 7, num_partitions=9, keeps_result=True)
    assert hand_to(nodes, directory) == (having(0, 1, 2, 3, 7), [])
