"""The cost of a run with many clients, counted in operations instead of seconds."""

import functools
import json
import logging
import sys
from collections import Counter
from dataclasses import replace

import pytest
from flwr.app import Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.config import presets, yaml_file
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch import in_process
from ravan_flwr.server.client_registry import AT_ONCE, MAX_LATE, ClientRegistry, Node
from ravan_flwr.server.partitions import Partitions
from ravan_flwr.server.round_log import LISTED, REJECTIONS_LOGGED, RoundLog
from tests.hand_made import Nodes, fake_clock, loaded_of, registered_client, run

__all__ = ["fake_clock"]

# A round of four clients, without an evaluation.
train_four = functools.partial(run, rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None)

PACKAGE = in_process.__file__.removesuffix("launch/in_process.py")


class OperationCount:
    """Count the Python operations of this package within the block."""

    def __enter__(self):
        self.number = 0
        self._before = sys.gettrace()
        sys.settrace(self._enter)
        return self

    def __exit__(self, *_):
        sys.settrace(self._before)

    def _enter(self, frame, event, arg):
        code = frame.f_code.co_filename
        # Code of `dataclass`, such as comparisons, has no file.
        if not code.startswith((PACKAGE, "<string>")):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._count

    def _count(self, frame, event, arg):
        self.number += 1
        return self._count


def operations(clients, rounds=1, **settings):
    """Return the number of operations of a run with this many clients, four of them a round."""
    nodes = Nodes(clients)
    with OperationCount() as count:
        train_four(nodes, rounds=rounds, **settings)
    return count.number


@pytest.fixture(scope="module", autouse=True)
def _imported():
    """Do the imports and fill the caches, as the first round of a process does."""
    train_four(Nodes(4), rounds=2)


@pytest.mark.parametrize(
    ("settings", "most"),
    [
        ({"weighting": "uniform"}, 6000),
        ({"weighting": "examples"}, 6000),
        ({"evaluate_on": "clients", "validation_share": 0.5, "evaluate_fn": None}, 12_000),
    ],
)
def test_the_cost_of_querying_and_of_client_evaluation_is_linear_in_the_nodes(settings, most):
    few, many = (operations(number, **settings) for number in (40, 160))
    assert many < 4.2 * few
    assert many / 160 < most


def test_a_client_outside_a_round_adds_almost_no_cost():
    def of_a_round(clients):
        return operations(clients, 2) - operations(clients)

    assert (of_a_round(160) - of_a_round(40)) / 120 < 250


def test_the_cost_of_skipped_clients_is_linear(monkeypatch):
    def skipped(self, kind, number):
        return number == 1 and self.node_id % 2

    def of_a_round(clients):
        with OperationCount() as count:
            notes, _, _ = train_four(Nodes(clients))
        assert len(notes.records[0]["skipped"]) == clients / 2
        return count.number

    monkeypatch.setattr(Node, "is_skipped", skipped)
    assert of_a_round(160) < 4.2 * of_a_round(40)


class Simulated(Nodes):
    """Nodes of Flower's simulation, which iterates over all open messages for every client."""

    in_process = False
    most = 0

    def push_messages(self, messages):
        ids = super().push_messages(messages)
        self.most = max(self.most, len(self._waiting))
        return ids


def test_the_number_of_open_queries_in_flowers_simulation_is_limited():
    nodes = Simulated(3 * AT_ONCE + 5)
    _, strategy, _ = train_four(nodes)
    assert nodes.most == AT_ONCE
    assert len(strategy.federation.registry.clients) == 3 * AT_ONCE + 5


def test_all_clients_are_queried_where_the_first_ones_are_refused():
    nodes = Simulated(2 * AT_ONCE)
    for number in range(11, 11 + AT_ONCE):
        nodes.registered[number] = replace(nodes.registered[number], backbone="another")
    _, strategy, _ = train_four(nodes)
    assert (
        len(strategy.federation.registry.clients)
        == len(strategy.federation.registry.refused)
        == AT_ONCE
    )


def test_a_waiting_message_is_found_without_iteration():
    class Watched(dict[str, Message]):
        walked = 0

        def __iter__(self):
            for key in super().__iter__():
                Watched.walked += 1
                yield key

    nodes = Nodes(300)
    nodes._waiting = Watched()
    queries = [Message(RecordDict(), node, "query") for node in nodes.registered]
    for message_id in reversed([*nodes.push_messages(queries)]):
        (reply,) = nodes.pull_messages([message_id])
        assert reply.metadata.reply_to_message_id == message_id
    assert Watched.walked == 0
    assert not nodes._waiting
    assert not nodes._last


def test_a_later_message_of_the_same_kind_replaces_the_earlier():
    nodes = Nodes(4)
    first, other, second = (
        next(iter(nodes.push_messages([Message(RecordDict(), node, "query")])))
        for node in (11, 12, 11)
    )
    assert nodes.pull_messages([first]) == []
    replies = [reply for _ in range(3) for reply in nodes.pull_messages([second, first, other])]
    assert [reply.metadata.reply_to_message_id for reply in replies] == [other, second]


def test_send_and_receive_returns_replies_in_message_order():
    nodes = Nodes(4)
    TaskIdentity.run_id = TaskIdentity.node_id = TaskIdentity.task_id = 1
    order = [14, 11, 13, 12]
    replies = nodes.send_and_receive(Message(RecordDict(), node, "query") for node in order)
    assert [reply.metadata.src_node_id for reply in replies] == order


def test_partition_claims_are_checked_once_a_client(monkeypatch):
    checked: Counter[str] = Counter()
    claim = Partitions.claim

    def count(self, one, key):
        checked["claims"] += 1
        return claim(self, one, key)

    monkeypatch.setattr(Partitions, "claim", count)
    train_four(Nodes(50), rounds=6)
    assert checked["claims"] == 50


def test_a_node_that_changes_its_partition_releases_the_old_one():
    parts = Partitions()
    assert parts.claim(registered_client(1, 0)) == ""
    assert "taken by node 1" in parts.claim(registered_client(2, 0))
    assert parts.claim(registered_client(1, 3)) == ""
    assert parts.claim(registered_client(2, 0)) == ""
    assert "taken by node 2" in parts.claim(registered_client(1, 0))
    assert parts.claim(registered_client(1, 3)) == ""


def test_the_bound_on_examples_depends_on_connected_clients():
    registry = ClientRegistry(read_config({}), loaded_of())
    for number, examples in enumerate((1, 1, 100), start=1):
        registry.nodes[number] = Node(number)
        registry._note(
            registry.nodes[number], registered_client(number, own_data=True, examples=examples), ""
        )
    last = registry.clients[3]
    assert registry.examples(last) == 10
    registry._refuse(registry.nodes[1], "it has gone")
    registry._refuse(registry.nodes[2], "it has gone, too")
    assert registry.clients.keys() == {3}
    assert registry.examples(last) == 100


def test_only_the_latest_late_replies_of_a_node_are_expected():
    node = Node(1)
    for number in range(3):
        node.expect_late(str(number), registered_client(1), f"late {number}")
    assert list(node.late) == [str(number) for number in range(3 - MAX_LATE, 3)]
    assert node.late["2"] == (registered_client(1), "late 2")


def sizes_of_records(clients):
    nodes = Nodes(clients)
    notes, strategy, _ = train_four(nodes, rounds=2)
    memory = sum(tensor.numel() for tensor in strategy.memory.values())
    return [len(json.dumps(record)) for record in notes.records], memory


def test_the_sizes_of_record_and_checkpoint_depend_on_participants_alone():
    (few, memory), (many, memory_of_many) = sizes_of_records(20), sizes_of_records(400)
    assert all(abs(a - b) < 100 for a, b in zip(few, many, strict=True))
    assert memory == memory_of_many


def test_clients_outside_a_round_are_listed_up_to_a_limit_and_counted():
    round_log = RoundLog(1, 10_000)
    round_log.clients.append({"partition-id": 3, "train-loss": 1.0})  # type: ignore[typeddict-item]
    assert not {"more-not-eligible", "more-skipped"} & round_log.record({}).keys()
    round_log.not_eligible, round_log.skipped = list(range(7000)), list(range(7000, 7000 + LISTED))
    record = round_log.record({})
    assert record["not-eligible"] == list(range(LISTED))
    assert record["more-not-eligible"] == 7000 - LISTED
    assert record["skipped"] == round_log.skipped
    assert "more-skipped" not in record
    assert len(json.dumps(record)) < 20_000


def test_the_log_has_the_first_rejections_and_the_record_all(caplog):
    round_log = RoundLog(3, 200)
    for number in range(200):
        round_log.reject(registered_client(number, number), "no disk")
    *logged, last = caplog.messages
    assert logged == [f"rejected partition {n}: no disk" for n in range(REJECTIONS_LOGGED)]
    assert "the record of round 3 lists them all" in last
    assert len(round_log.rejected) == 200


def test_ineligible_clients_are_logged_in_one_line(caplog):
    caplog.set_level(logging.INFO, "ravan_flwr")
    nodes = Nodes(200, method="fedit")
    for number in range(11, 111):
        nodes.registered[number] = replace(nodes.registered[number], budget_fraction=0.5)
    notes, _, _ = train_four(nodes, rounds=2, method="fedit")
    assert all(len(record["not-eligible"]) == 100 for record in notes.records)
    (line,) = [m for m in caplog.messages if "not eligible" in m]
    assert "partitions 100, 101, " in line
    assert line.endswith("119, and 80 more")


def test_a_preset_is_read_once_for_each_version_of_its_file(tmp_path, monkeypatch):
    reads: Counter[str] = Counter()
    read = yaml_file.read_yaml

    def count(path):
        reads[path.name] += 1
        return read(path)

    monkeypatch.setattr(yaml_file, "read_yaml", count)
    file = tmp_path / "mine.yaml"
    text = presets.preset_file("digits-vit").read_text()
    for batch, number in (("batch-size: 32", 32), ("batch-size: 8", 8)):
        file.write_text(text.replace("batch-size: 32", batch))
        for _ in range(50):
            config = read_config({"preset": presets.PresetPath(file)})
        assert config.batch_size == number
    assert reads["mine.yaml"] == 2
