"""The strategy with misbehaving nodes, over a Grid of hand-made replies."""

import logging
import math
import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.node_pb2 import NodeInfo

from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.registered_client import MOST_PARTITIONS, check_fingerprint
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server import update_norm_check
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.sampling import sample
from ravan_flwr.server.update import max_validation_size
from tests.hand_made import FINGERPRINT, Nodes, Unresponsive, fake_clock, registered_client, run
from tests.methods import train_client
from tests.reference import weighted_mean

__all__ = ["fake_clock"]

# A round of all clients, without an evaluation.
train_all = partial(run, rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None)


def test_a_round_records_its_clients_and_their_work():
    notes, _, result = run(Nodes(), clients_per_round=3, evaluate_fn=lambda *_: MetricRecord({}))
    assert [record["round"] for record in notes.records] == [1, 2]
    for record, state in zip(notes.records, notes.states, strict=True):
        assert len(record["clients"]) == 3
        ids = [client["partition-id"] for client in record["clients"]]
        assert ids == sorted(ids)
        for client in record["clients"]:
            assert client["heads"] == 3
            assert client["selected"] == [[0, 1, 2]] * 2
            assert client["bytes-up"] == 2 * 3 * 4 * 4 + 1
            assert client["bytes-down"] == 2 * 3 * 4 * 4
        assert state["H"].abs().sum() > 0
    assert torch.equal(result["H"], notes.states[-1]["H"])


def test_sampling_depends_on_seed_and_round_but_not_on_node_ids():
    one, other = Nodes(), Nodes()
    other.registered = {
        node_id + 1000: registered_client(node_id + 1000, client.partition_id)
        for node_id, client in reversed(one.registered.items())
    }
    for nodes in (one, other):
        train_all(nodes, rounds=5, clients_per_round=2)
    assert sorted(one.trained) == sorted(other.trained)
    assert len({tuple(p for r, p in one.trained if r == n) for n in range(1, 6)}) > 1


def spoil(nodes, change, kind="train"):
    """Let partition 2 change its honest replies to messages of a kind."""

    def behave(partition_id, message):
        if partition_id != 2 or message.metadata.message_type != kind:
            return None
        honest = nodes.answer(nodes.registered[message.metadata.dst_node_id], message)
        return change(honest, message)

    nodes.behave = behave
    return nodes


def with_metrics(**changes):
    def change(reply, _):
        content = reply.content
        values = {k: v for k, v in {**content["metrics"], **changes}.items() if v is not None}
        content["metrics"] = MetricRecord(values)
        return reply

    return change


def with_tensor(name, tensor):
    def change(reply, _):
        arrays = from_record(reply.content["arrays"]) | {name: tensor}
        reply.content["arrays"] = to_record(arrays)
        return reply

    return change


def without_arrays(reply, _):
    del reply.content["arrays"]
    return reply


FAULTS = {
    "it raises": (lambda _, m: Message(Error(2, "no disk"), reply_to=m), "code 2: no disk"),
    "no reason": (lambda _, m: Message(Error(5), reply_to=m), "code 5: no reason given"),
    "another round": (with_metrics(round=7), "reply is of round 7, expected 1"),
    "no loss": (with_metrics(**{"train-loss": None}), "missing 'train-loss'"),
    "loss not finite": (with_metrics(**{"train-loss": math.nan}), "train-loss is nan"),
    "loss a list": (with_metrics(**{"train-loss": [1.0]}), r"train-loss is \[1.0\]"),
    "other bases": (with_metrics(fingerprint=[1.0, 2.1]), r"fingerprint \[1.0, 2.1\], expected"),
    "no fingerprint": (with_metrics(fingerprint=1.0), r"fingerprint \[\], expected"),
    "no arrays": (without_arrays, "missing 'arrays'"),
    "wrong shape": (with_tensor("H", torch.zeros(6, 2, 1)), r"H is torch.float32 \(6, 2, 1\)"),
    "not finite": (with_tensor("H", torch.full((6, 2, 2), torch.inf)), "not finite"),
    "huge": (with_tensor("H", torch.full((6, 2, 2), 1e9)), r"norm 4.899e\+09, expected at most"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_an_invalid_reply_is_rejected_and_the_round_continues(fault):
    change, reason = FAULTS[fault]
    notes, _, _ = train_all(spoil(Nodes(), change))
    (record,) = notes.records
    assert [client["partition-id"] for client in record["clients"]] == [0, 1, 3]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 2"
    assert re.search(reason, rejected["reason"])

    honest = Nodes()
    del honest.registered[12]  # partition 2
    expected, _, _ = train_all(honest)
    assert torch.equal(notes.states[0]["H"], expected.states[0]["H"])


CALIBRATION_FAULTS = {key: FAULTS[key] for key in ("it raises", "other bases", "no arrays")} | {
    "wrong shape": (with_tensor("change", torch.zeros(3)), r"change is torch.float32 \(3,\)"),
    "not finite": (with_tensor("change", torch.full((58,), torch.nan)), "change has .*not finite"),
    "huge": (with_tensor("change", torch.full((58,), 1e9)), r"norm 7.616e\+09, expected at most"),
}


@pytest.mark.parametrize("fault", CALIBRATION_FAULTS)
def test_an_invalid_calibration_reply_does_not_affect_the_bases(fault):
    change, reason = CALIBRATION_FAULTS[fault]
    nodes = spoil(Nodes(method="fed-sb"), change, "train.calibrate")
    notes, _, _ = train_all(nodes, method="fed-sb")
    calibration = notes.records[0]
    assert (calibration["round"], len(calibration["clients"])) == (0, 3)
    (rejected,) = calibration["rejected"]
    assert re.search(reason, rejected["reason"])
    # The mean of the others' replies: every weight 1, 2 and 4 larger.
    means = [(1 + 2 + 4) / 3 * (rows * columns) ** 0.5 for rows, columns in ((6, 5), (4, 7))]
    torch.testing.assert_close(notes.calibrated_state["H"][:, 0, 0], torch.tensor(means))


@pytest.mark.parametrize(
    ("weighting", "weights"), [("uniform", [1.0] * 3), ("examples", [56.0, 61.0, 66.0])]
)
def test_replies_are_weighted_uniformly_or_by_examples(weighting, weights):
    nodes = Nodes(3, method="fedit")
    for node_id, client in nodes.registered.items():  # nodes 11, 12, 13
        nodes.registered[node_id] = replace(client, examples=1 + 5 * node_id)
    notes, _, _ = train_all(nodes, method="fedit", weighting=weighting)
    initial = nodes.method.initial_state(nodes.adapters)
    uploads = [train_client(nodes.method, nodes.adapters, initial, 1.0, p) for p in (2, 1, 0)]
    for name in ("B", "A"):
        expected = weighted_mean([upload[name] for upload in uploads], weights)
        torch.testing.assert_close(notes.states[0][name], expected.float())


def test_eligible_clients_may_be_disconnected_for_a_round():
    nodes = Nodes(3, method="fedit", budget_fraction=0.5)
    nodes.registered[11] = registered_client(11, 2, num_partitions=3)

    def drop_out(_, message):
        if message.metadata.message_type == "train":
            return nodes.answer(nodes.registered.pop(11), message)
        return None

    nodes.behave = drop_out
    with pytest.raises(RuntimeError, match=r"round 2: got no valid reply.*resume=RUN"):
        train_all(nodes, rounds=2, method="fedit")


@pytest.mark.parametrize(
    ("method", "kind", "number"), [("ravan", "train", 2), ("fed-sb", "train.calibrate", 0)]
)
def test_a_round_without_a_valid_reply_stops_the_run(method, kind, number):
    def fail(_, message):
        if message.metadata.message_type == kind and message.content["config"]["round"] == number:
            return Message(Error(2, "out of memory"), reply_to=message)
        return None

    error = rf"round {number}: got no valid reply, .*partitions 0, 1, 2, 3: .*out of memory"
    with pytest.raises(RuntimeError, match=error):
        train_all(Nodes(behave=fail, method=method), rounds=2, method=method)


class Slow(Nodes):
    """Partition 1's training replies of round 1 arrive in round 2, as over a network."""

    in_process = False

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.held = []

    def pull_messages(self, message_ids):
        ids = set(message_ids)
        now = [r for r in self.held if r.metadata.reply_to_message_id in ids and self.later]
        self.held = [reply for reply in self.held if reply not in now]
        for reply in super().pull_messages(ids):
            (self.held if self.is_slow(reply) else now).append(reply)
        return now

    @property
    def later(self):
        return any(number == 2 for number, _ in self.trained)

    def is_slow(self, reply):
        node = self.registered[reply.metadata.src_node_id]
        kind = reply.metadata.message_type == "train"
        return kind and node.partition_id == 1 and not self.later


def test_a_late_reply_is_refused_once_and_recorded():
    notes, _, _ = train_all(Slow(), rounds=3, timeout=0.5)
    first, second, third = notes.records
    assert first["rejected"] == [{"client": "partition 1", "reason": "no reply within 0.5 s"}]
    late = {"client": "partition 1", "reason": "late: a reply to round 1, which closed after 0.5 s"}
    assert second["late"] == [late]
    assert "late" not in first.keys() | third.keys()
    assert not second["rejected"]
    assert [c["partition-id"] for c in third["clients"]] == [0, 1, 2, 3]
    assert not third["rejected"]
    # Its bytes arrived, too.
    one = second["clients"][0]["bytes-up"]
    assert second["bytes-up"] == one * (len(second["clients"]) + 1)


def test_a_round_needs_min_replies_valid_replies():
    notes, _, _ = train_all(Unresponsive(1, 3), min_replies=2, timeout=0.3)
    assert [c["partition-id"] for c in notes.records[0]["clients"]] == [0, 2]
    message = "got 2 valid replies, expected at least min-replies = 3: partitions 1, 3: no reply"
    with pytest.raises(RuntimeError, match=message):
        train_all(Unresponsive(1, 3), min_replies=3, timeout=0.3)
    with pytest.raises(ValueError, match="min-replies = 5: the nodes have num-partitions = 4"):
        train_all(Nodes(), min_replies=5, clients_per_round=5)


def test_a_change_of_the_clients_that_are_not_connected_is_logged(caplog):
    class Away(Nodes):
        def get_node_ids(self):
            return list(self.registered)[bool(self.trained) :]

    caplog.set_level(logging.INFO, "ravan_flwr")
    notes, _, _ = train_all(Away(), rounds=3)
    assert [len(record["clients"]) for record in notes.records] == [4, 3, 3]
    (line,) = [line for line in caplog.messages if "not connected" in line]
    assert line.startswith("1 of 4 clients are not connected: the round asks 3")


def test_a_round_waits_for_disconnected_nodes():
    class Away(Nodes):
        asked = 0

        def get_node_ids(self):
            self.asked += bool(self.trained)  # after the first round
            return [11] if 0 < self.asked < 6 else list(self.registered)

    notes, _, _ = train_all(Away(), rounds=3, min_replies=3)
    assert all(len(record["clients"]) == 4 for record in notes.records)


def test_evaluation_metrics_of_clients_are_validated():
    def behave(partition_id, message):
        if message.metadata.message_type != "evaluate" or partition_id == 3:
            return None
        values: dict[str, Any] = {
            0: {"round": 1, "num-examples": 1, "accuracy": 1.0},  # without a loss
            1: {"round": 1, "num-examples": 10**12, "accuracy": 1.0, "loss": 0.0},
            2: {"round": 1, "num-examples": 1, "accuracy": float("nan"), "loss": 0.0},
        }[partition_id]
        return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)

    settings = {"evaluate_on": "clients", "validation_share": 0.5}
    notes, _, _ = run(Nodes(behave=behave), rounds=1, clients_per_round=4, **settings)
    (record,) = notes.records
    assert record["metrics"] == {"accuracy": 0.75, "loss": 1.0}
    reasons = {entry["client"]: entry["reason"] for entry in record["rejected"]}
    assert reasons == {
        "partition 0": "missing 'loss'",
        "partition 1": "num-examples is 1e+12, expected above 0 and at most 12",
        "partition 2": "accuracy is nan, expected a finite number",
    }


def test_a_message_that_cannot_be_sent_is_recorded():
    class Full(Nodes):
        def push_messages(self, messages):
            return super().push_messages([m for m in messages if not self.too_large(m.metadata)])

        def too_large(self, meta):
            return meta.message_type == "train" and meta.dst_node_id == 11

    (record,) = train_all(Full())[0].records
    reason = "the message could not be sent"
    assert record["rejected"] == [{"client": "partition 3", "reason": reason}]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"code": "x"}, "its ravan_flwr has fingerprint x, expected"),
        ({"backbone": "x"}, "its backbone has fingerprint x, expected b"),
        ({"fingerprint": (1.0, 3.0)}, r"its bases have fingerprint \[1.0, 3.0\]"),
        ({"examples": 0}, "examples is 0, expected 1 to"),
        ({"fingerprint": ("a", "b")}, r"fingerprint is \['a', 'b'\], expected float numbers"),
        ({"num_partitions": 5}, "num-partitions is 5, expected 4 as the others have"),
        ({"budget_fraction": 1.5}, "budget-fraction is 1.5, expected above 0 and at most 1"),
        ({"partition_id": 4}, r"partition-id is 4, expected 0 to 3"),
        ({"partition_id": 0}, "partition-id 0 is taken by node"),
    ],
)
def test_an_incompatible_node_is_refused_by_name(change, reason):
    nodes = Nodes()
    nodes.registered[11] = registered_client(11, **{"partition_id": 3} | change)
    _, strategy, _ = train_all(nodes)
    ((node_id, refusal),) = strategy.federation.registry.refused.items()
    assert node_id in {11, 14}
    assert re.search(reason, refusal)
    assert len(strategy.federation.registry.clients) == 3


def test_a_node_of_another_version_is_refused_for_its_version():
    """Its answer may have other fields."""

    def behave(partition_id, message):
        if partition_id or message.metadata.message_type != "query":
            return None
        answer = registered_client(14, 0, code="x").as_config()
        del answer["fingerprint"]
        return Message(RecordDict({"client": ConfigRecord(answer)}), reply_to=message)

    _, strategy, _ = train_all(Nodes(behave=behave))
    (refusal,) = strategy.federation.registry.refused.values()
    assert refusal.startswith("its ravan_flwr has fingerprint x, expected")


@pytest.mark.parametrize("change", [{"num_partitions": 5, "own_data": True}, {"device": ""}])
def test_a_node_may_differ_in_these_fields(change):
    nodes = Nodes()
    nodes.registered[11] = registered_client(11, 3, **change)
    _, strategy, _ = train_all(nodes)
    assert not strategy.federation.registry.refused
    assert strategy.federation.registry.partitions == 4  # own data are not counted


def test_without_an_eligible_node_the_run_stops_and_few_refusals_are_logged(caplog):
    message = "no node to train on: all 500 were refused: its backbone [^;]*; copy the server's"
    with pytest.raises(RuntimeError, match=message):
        run(Nodes(500, backbone="other"))
    logged = [record.message for record in caplog.records if "refused" in record.message]
    assert len(logged) == 6
    assert logged[0].startswith("refused partition 499: its backbone")
    assert logged[-1].startswith("refused 495 nodes more: its backbone")
    with pytest.raises(RuntimeError, match="no node to train on: none is connected"):
        run(Nodes(0))


CANNOT = ConfigRecord({"partition-id": 3, "reason": "got unknown labels c; expected\na, b"})
FLOWERS = "<class 'ValueError'>:<'node config: partition-id is missing, expected 'a' number'>"


@pytest.mark.parametrize(
    ("make", "name", "reason"),
    [
        (lambda m: Message(RecordDict({"refused": CANNOT}), reply_to=m),
         "partition 3", r"got unknown labels c; expected\na, b"),
        (lambda m: Message(Error(2, FLOWERS), reply_to=m),
         "node 11", "node config: partition-id is missing, expected 'a' number"),
        (lambda m: Message(Error(2, "<class 'OSError'>:<'no disk'>"), reply_to=m),
         "node 11", "it failed with code 2: <class 'OSError'>:<'no disk'>"),
        (lambda m: Message(RecordDict({"refused": ConfigRecord({"partition-id": -1})}), reply_to=m),
         "node 11", "it gives no reason"),
    ],
)  # fmt: skip
def test_a_device_that_cannot_take_part_goes_by_its_partition_and_one_sentence(
    make, name, reason, caplog
):
    def behave(partition, message):
        return make(message) if (partition, message.metadata.message_type) == (3, "query") else None

    _, strategy, _ = run(Nodes(behave=behave), rounds=1, clients_per_round=3)
    logged = [line for line in caplog.messages if "refused" in line]
    assert logged == [f"refused {name}: {reason}"]
    assert len(strategy.federation.registry.clients) == 3
    refused = [node for node in strategy.federation.registry.nodes.values() if node.refused]
    assert [(node.name, node.refused) for node in refused] == [(name, reason)]


@pytest.mark.parametrize(
    ("method", "asked", "is_logged"),
    [("ravan", 30, True), ("ravan", 2, False), ("local", 30, False)],
)
def test_the_log_has_the_clients_and_whether_a_round_asks_more(method, asked, is_logged, caplog):
    caplog.set_level("INFO", "ravan_flwr")
    run(Nodes(4), rounds=1, method=method, clients_per_round=asked)
    assert f"; {min(asked, 4)} clients a round, " in caplog.text
    assert "4 nodes with 40 examples" in caplog.text
    assert ("; clients-per-round is 30, but no more can" in caplog.text) is is_logged


def test_late_nodes_are_queried_and_disconnected_ones_not_sampled():
    nodes = Nodes()
    late = nodes.registered.pop(13)

    def evaluate(number, _):
        if number == 2:
            nodes.registered[13] = late
        if number == 4:
            del nodes.registered[11]

    train_all(nodes, rounds=6, evaluate_fn=evaluate)
    by_round = [{p for r, p in nodes.trained if r == n} for n in range(1, 7)]
    assert by_round == [{0, 2, 3}] * 2 + [{0, 1, 2, 3}] * 2 + [{0, 1, 2}] * 2


class Silent(Nodes):
    """Node 13 does not answer its query before a round."""

    until = math.inf

    def pull_messages(self, message_ids):
        ids = set(message_ids)
        if not self.trained or self.trained[-1][0] < self.until:
            ids -= {k for k, m in self._waiting.items() if m.metadata.dst_node_id == 13}
        return super().pull_messages(ids)


def test_a_run_begins_without_an_unresponsive_node():
    notes, strategy, _ = train_all(Silent())
    assert len(notes.records[0]["clients"]) == 3
    assert strategy.federation.registry.refused == {13: "no answer within 0.2 s"}


def test_a_round_does_not_wait_for_a_new_node_that_does_not_answer(monkeypatch):
    """It connects in round 1, and answers in round 3."""
    monkeypatch.setattr(recruiting, "QUERY_TIMEOUT", 1800.0)
    nodes = Silent()
    late, nodes.until = nodes.registered.pop(13), 3

    def evaluate(number, _):
        if number == 1:
            nodes.registered[13] = late

    train_all(nodes, rounds=5, evaluate_fn=evaluate)
    by_round = [{p for r, p in nodes.trained if r == n} for n in range(1, 6)]
    assert by_round == [{0, 2, 3}] * 3 + [{0, 1, 2, 3}] * 2


def test_a_run_does_not_wait_for_a_node_that_disconnects_at_each_query(monkeypatch):
    class Disconnecting(Silent):
        """Node 13 reconnects before every poll, and disconnects before it answers."""

        looks = 0

        def get_nodes(self):
            self.looks += 1
            for node_id in self.registered:
                since = str(self.looks) if node_id == 13 else "then"
                yield NodeInfo(node_id=node_id, last_activated_at=since)

    monkeypatch.setattr(recruiting, "QUERY_TIMEOUT", 1800.0)
    notes, strategy, _ = train_all(Disconnecting(), rounds=2)
    assert [len(record["clients"]) for record in notes.records] == [3, 3]
    assert 13 not in strategy.federation.registry.clients


class Restarted(Nodes):
    """A node that is always listed, but with a later connection time after its restart."""

    since = "morning"

    def get_nodes(self):
        for node_id in self.get_node_ids():
            yield NodeInfo(node_id=node_id, last_activated_at=self.since if node_id == 11 else "")


@pytest.mark.parametrize("before", [{"budget_fraction": 7.0}, {}])
@pytest.mark.parametrize("after", [{}, {"num_partitions": 5}, {"budget_fraction": 0.5}])
def test_a_restarted_node_is_queried_again(before, after):
    nodes = Restarted()
    nodes.registered[11] = registered_client(11, 3, **before)

    def evaluate(number, _):
        if number == 1:
            nodes.registered[11], nodes.since = registered_client(11, 3, **after), "noon"

    notes, strategy, _ = train_all(nodes, rounds=3, evaluate_fn=evaluate)
    fractions = [
        [c["budget-fraction"] for c in r["clients"] if c["partition-id"] == 3]
        for r in notes.records
    ]
    expected = [] if "num_partitions" in after else [after.get("budget_fraction", 1.0)]
    assert fractions == [[] if before else [1.0], expected, expected]
    assert bool(strategy.federation.registry.refused) == ("num_partitions" in after)


@pytest.mark.parametrize(
    ("numbers", "stay"),
    [
        ([(0, 5), (0, 4), (1, 4), (2, 4), (3, 4)], {12, 13, 14, 15}),
        ([(0, 2), (1, 2), (2, 4), (3, 4)], {13, 14}),  # equally many nodes claim either number
        ([(0, 4), (1, 4), (1, 4)], {11, 12}),
        ([(1, 10_000), (0, 2)], {12}),  # one node of two partitions is here, and one of 10,000
        ([(3, 2 * MOST_PARTITIONS), (0, 4), (1, 4), (2, 4)], {12, 13, 14}),
    ],
)
def test_the_majority_of_nodes_decides_the_number_of_partitions(numbers, stay):
    nodes = Nodes()
    nodes.registered = {
        11 + i: registered_client(11 + i, partition, num_partitions=number)
        for i, (partition, number) in enumerate(numbers)
    }
    notes, strategy, _ = train_all(nodes)
    assert strategy.federation.registry.clients.keys() == stay
    assert len(strategy.federation.registry.refused) == len(numbers) - len(stay)
    assert (
        strategy.federation.registry.partitions == notes.records[0]["partitions"] == numbers[-1][1]
    )


def test_a_refused_node_is_queried_again_when_it_reconnects():
    nodes = Nodes()
    good, nodes.registered[11] = nodes.registered[11], registered_client(11, 3, budget_fraction=7.0)

    def evaluate(number, _):
        if number == 1:
            del nodes.registered[11]
        if number == 2:
            nodes.registered[11] = good

    notes, strategy, _ = train_all(nodes, rounds=4, evaluate_fn=evaluate)
    assert [len(record["clients"]) for record in notes.records] == [3, 3, 4, 4]
    assert not strategy.federation.registry.refused


@pytest.mark.parametrize("fraction", [0.01, 0.1, 0.2, 0.3, 0.5, 0.7, 0.9])
def test_a_claim_of_validation_examples_is_accepted_up_to_its_split(fraction):
    for number in range(2, 500):
        held_back = math.ceil(fraction * number)
        if held_back < number:
            most = max_validation_size(number - held_back, fraction)
            assert held_back <= most <= held_back + 1 / (1 - fraction) + 2


def test_client_evaluation_is_weighted_by_examples():
    settings = {"evaluate_on": "clients", "validation_share": 0.5, "eval_every": 2}
    notes, _, _ = run(Nodes(), rounds=3, **settings)
    mean = (0 * 1 + 1 * 2 + 2 * 3 + 3 * 4) / (1 + 2 + 3 + 4) / 4
    metrics = [record["metrics"] for record in notes.records]
    expected = {"accuracy": pytest.approx(mean), "loss": 1.0}
    assert metrics == [{}, expected, expected]


@pytest.mark.parametrize(("claim", "valid"), [(1000, True), (1003, False)])
def test_an_evaluation_on_much_own_data_counts_as_far_as_max_examples(claim, valid):
    """Half of 2000 examples are held back; 60 of the device's 1000 training examples count."""

    def behave(partition, message):
        if message.metadata.message_type != "evaluate":
            return None
        number = claim if partition == 2 else 10
        values = {"round": 1, "num-examples": number, "accuracy": partition / 4, "loss": 1.0}
        return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)

    nodes = Nodes(behave=behave, own_data=True)
    nodes.registered[12] = registered_client(12, 2, own_data=True, examples=1000)
    settings = {"evaluate_on": "clients", "validation_share": 0.5, "max_examples": 60}
    notes, _, _ = run(nodes, rounds=1, **settings)
    (record,) = notes.records
    weights = {0: 10, 1: 10, 2: 60 + 2 if valid else 0, 3: 10}  # see `max_validation_size`
    total = sum(weight * partition / 4 for partition, weight in weights.items())
    assert record["metrics"]["accuracy"] == pytest.approx(total / sum(weights.values()))
    assert [entry["client"] for entry in record["rejected"]] == ["partition 2"] * (not valid)


def test_a_run_that_a_large_round_ends_is_evaluated(monkeypatch):
    """Three rounds of usual size fit; in the second a client sends more than all of these."""
    monkeypatch.setattr("ravan_flwr.server.stop_conditions._planned", lambda _: 1)

    class Larger(Nodes):
        def reply(self, message, upload, number):
            if number == 2 and not self.trained[-1][1]:
                upload = upload | {"classifier": torch.zeros(20_000)}
            return super().reply(message, upload, number)

    settings: dict[str, Any] = {"rounds": 9, "clients_per_round": 4, "eval_every": 9}
    settings["evaluate_fn"] = lambda *_: MetricRecord({"accuracy": 0.5})
    usual, *_ = run(Nodes(), **settings)
    size = usual.records[0]["bytes-up"] + usual.records[0]["bytes-down"]
    assert [record["metrics"] for record in usual.records] == [{}] * 8 + [{"accuracy": 0.5}]
    notes, *_ = run(Larger(), **settings, max_bytes=3.5 * size + 80_000)
    assert [record["metrics"] for record in notes.records] == [{}, {"accuracy": 0.5}]


def test_sampling_is_uniform():
    clients = [registered_client(i, i, num_partitions=10) for i in range(10)]
    counts = dict.fromkeys(range(10), 0)
    for number in range(1000):
        chosen = sample(clients, 3, 0, number)
        assert len({m.partition_id for m in chosen}) == 3
        for one in chosen:
            counts[one.partition_id] += 1
    assert min(counts.values()) > 240  # 300 expected, standard deviation 14.5
    assert max(counts.values()) < 360


def test_fingerprints_agree_to_rounding_only():
    check_fingerprint([1.0, 2.0 + 1e-6], FINGERPRINT)
    for other in ([1.0], [1.0, 2.01], [1.0, math.nan]):
        with pytest.raises(ValueError, match="its bases have fingerprint"):
            check_fingerprint(other, FINGERPRINT)


def test_an_impossible_next_state_is_discarded_and_the_run_continues(monkeypatch, caplog):
    real, calls = update_norm_check.UpdateNormCheck.check_state, []

    def refuse(self, old, new, *others):
        calls.append(new)
        if len(calls) == 1:
            raise ValueError("the norm of H would grow by 7, expected at most 1")
        real(self, old, new, *others)

    monkeypatch.setattr(update_norm_check.UpdateNormCheck, "check_state", refuse)
    nodes = Nodes()
    notes, _, _ = train_all(nodes, rounds=2)
    first, second = notes.records
    assert first["refused"] == "the norm of H would grow by 7, expected at most 1"
    assert "refused" not in second
    assert torch.equal(notes.states[0]["H"], nodes.method.initial_state(nodes.adapters)["H"])
    assert notes.states[1]["H"].abs().sum() > 0
    assert "round 1 has no effect, the state stays as it was" in caplog.text


def test_with_robust_weighting_fewer_than_three_replies_change_nothing(caplog):
    notes, _, _ = train_all(Nodes(2), weighting="median")
    assert not notes.states[0]["H"].any()
    assert "2 replies came, and weighting = 'median' changes nothing" in caplog.text


@pytest.mark.parametrize("weighting", ["krum", "multi-krum"])
def test_with_krum_fewer_than_five_replies_change_nothing(weighting, caplog):
    notes, _, _ = train_all(Nodes(4), weighting=weighting, clients_per_round=5)
    assert not notes.states[0]["H"].any()
    assert f"4 replies came, and weighting = '{weighting}' changes nothing" in caplog.text
    with pytest.raises(RuntimeError, match="round 0: got 4 valid replies, expected at least .* 5"):
        train_all(
            Nodes(4, method="fed-sb"), method="fed-sb", weighting=weighting, clients_per_round=5
        )


def test_with_krum_a_device_that_trains_a_part_is_not_eligible(caplog):
    """Its budget is set on the device, and no setting of the server has it."""
    nodes = Nodes(6)
    nodes.registered[13] = replace(nodes.registered[13], budget_fraction=0.5)  # partition 3
    with caplog.at_level("INFO"):
        notes, _, _ = train_all(nodes, weighting="krum", clients_per_round=6)
    record = notes.records[0]
    assert [one["partition-id"] for one in record["clients"]] == [0, 1, 2, 4, 5]
    assert record["not-eligible"] == [3]
    assert "5 clients a round" in caplog.text
    nodes = Nodes(5, budget_fraction=0.5)
    with pytest.raises(ValueError, match="'ravan' with weighting=krum is trained whole or not"):
        train_all(nodes, weighting="krum", clients_per_round=5)


def test_a_calibration_asks_further_clients_if_its_cohort_fails():
    def fail(partition, message):
        if message.metadata.message_type == "train.calibrate" and partition < 3:
            return Message(Error(2, "no memory"), reply_to=message)
        return None

    settings = {"method": "fed-sb", "clients_per_round": 1, "evaluate_fn": lambda *_: None}
    for seed in range(4):  # another client is asked first
        notes, _, _ = run(Nodes(behave=fail, method="fed-sb"), rounds=1, seed=seed, **settings)
        assert [c["partition-id"] for c in notes.records[0]["clients"]] == [3]


def test_a_robust_calibration_needs_three_replies():
    message = "round 0: got 2 valid replies, expected at least min-replies = 3"
    with pytest.raises(RuntimeError, match=message):
        train_all(Nodes(2, method="fed-sb"), method="fed-sb", weighting="median")


def test_equal_reasons_are_reported_once_with_their_clients():
    round_log = RoundLog(1, 12)
    for number in range(12):
        reason = "out of memory" if number == 3 else "no such column"
        round_log.reject(registered_client(partition_id=number), reason)
    message = round_log.too_few_replies_message(1)
    assert message.count("no such column") == 1
    assert "partitions 0, 1, 2, 4, 5, 6, 7, 8, and 3 more: no such column; " in message
    assert "partition 3: out of memory" in message


def test_momentum_does_not_move_the_state_in_a_round_of_which_two_replies_came(caplog):
    """`weighting=median` changes nothing with two replies, whatever the earlier rounds did."""

    def behave(partition, message):
        is_training = message.metadata.message_type == "train"
        if is_training and message.content["config"]["round"] == 2 and partition >= 2:
            return Message(Error(1, "no memory"), reply_to=message)
        return None

    settings = {"weighting": "median", "server_optimizer": "momentum", "clients_per_round": 4}
    settings |= {"evaluate_fn": lambda *_: None, "min_replies": 2}
    first, second, third = run(Nodes(behave=behave), 3, **settings)[0].states
    assert torch.equal(first["H"], second["H"])
    assert not torch.equal(second["H"], third["H"])
    assert (
        "2 replies came, and weighting = 'median' changes nothing with fewer than 3" in caplog.text
    )
