"""Unresponsive and slow nodes: deadlines of a round, sampling, and claims about examples."""

import itertools
import math
import threading
import time
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from torch.overrides import TorchFunctionMode

from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.registered_client import read_registered_client
from ravan_flwr.messages.wire import decode, encode
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server import round_log, waiting
from ravan_flwr.server.client_registry import Node
from ravan_flwr.server.releases import release_class
from ravan_flwr.server.round_log import weighted_mean
from ravan_flwr.server.sampling import Sampler, sample
from ravan_flwr.server.waiting import RoundDeadline
from tests.hand_made import (
    Nodes,
    Unresponsive,
    fake_clock,
    loaded_of,
    registered_client,
    run,
    settings_from,
    strategy_of,
)

__all__ = ["fake_clock"]

# A round of all clients, without an evaluation.
train_all = partial(run, rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None)


@pytest.mark.parametrize(
    ("options", "used_at", "ends_at"),
    [
        ({}, [1, 2, 3], 3600),  # without a straggler timeout
        ({"quorum": 2, "grace": 30.0}, [5], 3600),
        ({"quorum": 2, "grace": 30.0}, [5, 9], 39),
        ({"quorum": 2, "grace": 30.0}, [5, 9, 20], 39),
        ({"quorum": 9, "grace": 0.0}, [1, 2, 3, 4], 4),  # fewer replies than `quorum`
        ({"grace": None}, [5], 3600),  # auto: half of the sampled clients
        ({"grace": None}, [5, 40], 440),
        ({"grace": None}, [1, 2], 62),
        ({"grace": None}, [1, 3000], 3600),
        ({"quorum": 3, "grace": None}, [1, 2], 3600),
    ],
)
def test_the_deadline_of_a_round(options, used_at, ends_at):
    began = time.monotonic()  # of the fake clock
    deadline = RoundDeadline(3600, 4, **options)
    for moment in used_at:
        time.sleep(began + moment - time.monotonic())
        deadline.use()
    time.sleep(began + ends_at - 1 - time.monotonic())
    assert deadline.left == 1
    assert deadline.seconds == ends_at


def test_enough_replies_end_a_round_and_a_deadline_may_be_infinite():
    deadline = RoundDeadline(math.inf, 4, enough=2)
    deadline.use()
    assert not deadline.satisfied
    deadline.use()
    assert deadline.satisfied
    assert math.isinf(deadline.left)


class Remote(Unresponsive):
    """Nodes as over a network: replies are fetched, and rounds have a straggler timeout."""

    in_process = False


def test_an_unresponsive_node_delays_a_round_by_the_straggler_timeout():
    began = time.monotonic()
    notes, _, _ = train_all(Remote(1), timeout=60, min_replies=3, straggler_grace=0.3)
    assert time.monotonic() - began < 10
    (record,) = notes.records
    assert [c["partition-id"] for c in record["clients"]] == [0, 2, 3]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 1"
    assert rejected["reason"].startswith("no reply within 0.3")


def test_a_repeatedly_unresponsive_client_is_asked_less_often():
    notes, _, _ = train_all(Unresponsive(1), rounds=8, timeout=0.2)
    asked_rounds = [r["round"] for r in notes.records if r["rejected"]]
    assert asked_rounds == [1, 2, 4, 8]  # skipped for 0, 1, 3 rounds
    skipped = [r["round"] for r in notes.records if r["skipped"] == [1]]
    assert skipped == [3, 5, 6, 7]


def test_a_skipped_client_that_a_round_asks_after_all_is_not_recorded_as_skipped():
    """In round 3 partition 1 would be skipped, but the round needs it: another reply is bad."""

    def behave(partition, message):
        is_bad = (message.metadata.message_type, message.metadata.group_id, partition) == (
            "train", "3", 0,
        )  # fmt: skip
        return Message(RecordDict(), reply_to=message) if is_bad else None

    class Late(Unresponsive):
        def is_unresponsive(self, reply):
            return super().is_unresponsive(reply) and reply.metadata.group_id != "3"

    nodes = Late(1)
    nodes.behave = behave
    notes, _, _ = train_all(nodes, rounds=3, timeout=0.2, min_replies=3)
    third = notes.records[2]
    assert "partition 0" in {entry["client"] for entry in third["rejected"]}
    assert {client["partition-id"] for client in third["clients"]} == {1, 2, 3}
    assert third["skipped"] == []


def test_a_client_that_replies_again_is_no_longer_skipped():
    node = Node(1)
    for number in (1, 2):
        node.note_missed_reply("train", number)
    assert [number for number in range(6) if not node.is_skipped("train", number)] == [4, 5]
    assert node.is_skipped("evaluate", 3)
    node.answered("train")
    assert node.failures == 0
    assert not node.is_skipped("train", 1)


class Partly(Nodes):
    """Partition 1 does not reply to messages of one kind, and replies to all others."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def pull_messages(self, message_ids):
        for reply in super().pull_messages(message_ids):
            node = self.registered[reply.metadata.src_node_id]
            if (reply.metadata.message_type, node.partition_id) != (self.kind, 1):
                yield reply


@pytest.mark.parametrize(("kind", "sampled"), [("evaluate", 4), ("train", 2)])
def test_a_client_is_skipped_for_the_kind_of_message_it_ignores(kind, sampled):
    settings = {"clients_per_round": sampled, "evaluate_on": "clients", "validation_share": 0.5}
    notes, _, _ = run(Partly(kind), rounds=12, timeout=0.2, **settings)
    asked_rounds = [r["round"] for r in notes.records if r["rejected"]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked_rounds)]
    assert len(asked_rounds) >= 3
    assert all(gap >= 2**k for k, gap in enumerate(gaps))


def test_skipped_clients_are_asked_where_too_few_others_remain():
    notes, _, _ = train_all(Unresponsive(1, 2), rounds=4, timeout=0.2, min_replies=2)
    assert [len(r["rejected"]) for r in notes.records] == [2, 2, 0, 2]


def test_more_clients_are_asked_than_are_used():
    plain, _, _ = train_all(Nodes(), rounds=3, clients_per_round=2)
    notes, _, _ = train_all(Nodes(), rounds=3, clients_per_round=2, over_sample=1.5)
    for record, state, other in zip(notes.records, notes.states, plain.states, strict=True):
        assert torch.equal(state["H"], other["H"])  # in process the same replies are first
        assert (len(record["clients"]), len(record["unused"])) == (2, 1)
        assert not record["rejected"]


def test_replies_of_the_clients_asked_first_count_for_those_asked_later():
    """Partition 0 answers of the first two clients, then one of the other two: two replies."""

    clients = [registered_client(i, i, num_partitions=4) for i in range(4)]
    seed = next(
        seed for seed in range(100)
        if [client.partition_id for client in sample(clients, 2, seed, 1)] == [0, 1]
    )  # fmt: skip
    settings = {"clients_per_round": 2, "min_replies": 2, "straggler_grace": 5.0, "seed": seed}
    began = time.monotonic()
    notes, _, _ = train_all(Remote(1, 3), timeout=600.0, **settings)
    (record,) = notes.records
    assert [c["partition-id"] for c in record["clients"]] == [0, 2]
    reasons = {r["client"]: r["reason"] for r in record["rejected"]}
    assert reasons["partition 1"].startswith("no reply within 600 s")
    assert time.monotonic() - began < 600 + 10


@pytest.mark.parametrize("is_in_process", [True, False])
def test_late_replies_are_fetched_over_a_network_alone(is_in_process):
    """In one process a client would run for the previous round during the current one."""

    class Watched(Unresponsive):
        in_process = is_in_process
        pushed, looked_for = 0, 0

        def push_messages(self, messages):
            Watched.pushed += 1
            self.ids = set(super().push_messages(messages))
            return self.ids

        def pull_messages(self, message_ids):
            ids = set(message_ids)
            Watched.looked_for += bool(ids - self.ids)
            return super().pull_messages(ids)

    train_all(Watched(1, 2), rounds=2, timeout=0.2, min_replies=2)
    assert Watched.pushed >= 3
    assert bool(Watched.looked_for) != is_in_process


def test_over_sampled_clients_replace_unresponsive_ones():
    settings = {"clients_per_round": 2, "over_sample": 2.0}
    (record,) = train_all(Unresponsive(0, 1), timeout=1.0, **settings)[0].records
    assert [c["partition-id"] for c in record["clients"]] == [2, 3]
    assert sorted(record["unused"]) == [0, 1]


def test_over_sampling_does_not_change_the_sampled_clients():
    clients = [registered_client(i, i, num_partitions=10) for i in range(10)]
    for number in range(50):
        alone, more = sample(clients, 3, 0, number), sample(clients, 3, 0, number, reserve=4)
        assert more[:3] == alone
        assert len({m.partition_id for m in more}) == 7


# Identity of nodes.


class Reconnecting(Nodes):
    """Nodes whose connection time a test sets."""

    since: dict[int, str]

    def get_nodes(self):
        for node_id in self.get_node_ids():
            moment = getattr(self, "since", {}).get(node_id, "then")
            yield NodeInfo(node_id=node_id, last_activated_at=moment)


def test_a_reconnecting_node_cannot_take_the_partition_of_another():
    """Node 11 is the first in every dict, and reconnects repeatedly with node 14's partition."""
    nodes = Reconnecting()

    def evaluate(number, _):
        nodes.registered[11] = registered_client(11, 0)
        nodes.since = {11: str(number)}
        if number == 3:  # the owner reconnects, too
            nodes.since[14] = "later"

    notes, strategy, _ = train_all(nodes, rounds=6, evaluate_fn=evaluate)
    trained = [[c["partition-id"] for c in record["clients"]] for record in notes.records]
    assert trained == [[0, 1, 2, 3]] + [[0, 1, 2]] * 5
    assert strategy.federation.registry.clients.keys() == {12, 13, 14}
    assert "partition-id 0 is taken by node 14" in strategy.federation.registry.refused[11]


class Keyed(Reconnecting):
    """Each node has a key: node 1x has that of the number x, unless `keys` has another."""

    in_process = False
    keys: dict[int, bytes]
    run: Any = SimpleNamespace(primary_task_type="")  # no simulation

    def get_nodes(self):
        for info in super().get_nodes():
            keys = getattr(self, "keys", {})
            info.public_key = keys.get(info.node_id, b"key %d" % info.node_id)
            yield info


def test_a_partition_belongs_to_the_key_that_had_it_when_a_run_is_resumed(caplog, tmp_path):
    _, first, _ = train_all(Keyed())
    directory = RunDirectory(tmp_path)
    directory.write_node_keys(first.federation.registry.owners)
    owners = directory.read_node_keys()
    assert set(owners) == {0, 1, 2, 3}
    assert len(set(owners.values())) == 4

    stolen = Keyed()  # while the owner, node 14, is not connected
    stolen.keys = {14: b"of somebody else"}
    _, again, _ = train_all(stolen, owners=owners)
    assert (
        "partition-id 0 belongs to a node with another key" in again.federation.registry.refused[14]
    )
    assert "node-keys.json" in again.federation.registry.refused[14]
    assert again.federation.registry.clients.keys() == {11, 12, 13}
    assert again.federation.registry.owners == owners

    anew = Keyed()  # SuperNodes without keys of their own have new ones after a restart
    anew.keys = {n: b"new %d" % n for n in (11, 12, 13, 14)}
    _, new, _ = train_all(anew, owners=owners)
    assert not new.federation.registry.refused
    assert "no node has its earlier key" in caplog.text


def test_link_bytes_are_estimated_for_deployments_alone(monkeypatch):
    """The estimate adds calls, waiting, and the app bundle, once for each node, to the payload."""
    monkeypatch.setattr(round_log, "bundle_bytes", lambda: 10**9)
    notes, _, _ = run(Keyed(), clients_per_round=2, evaluate_fn=lambda *_: None)
    first, second = (record["link-bytes-estimate"] for record in notes.records)
    payload = [record["bytes-up"] + record["bytes-down"] for record in notes.records]
    travels = round_log.FRAMES * payload[0] + round_log.FRAMES * 4 * 10**9
    assert first - travels >= 6 * round_log.MESSAGE_BYTES  # four clients are queried
    assert 0 < second - round_log.FRAMES * payload[1] - 2 * round_log.MESSAGE_BYTES < 10**6
    notes, _, _ = run(Reconnecting(), clients_per_round=2, evaluate_fn=lambda *_: None)
    assert "link-bytes-estimate" not in notes.records[0]


def test_the_bundle_size_is_measured_if_the_app_runs_from_one(monkeypatch, tmp_path):
    module = tmp_path / "apps" / "x" / "a" / "b" / "round_log.py"
    module.parent.mkdir(parents=True)
    monkeypatch.setattr(round_log, "__file__", str(module))
    module.write_bytes(b"x" * 100_000)
    measured = round_log.bundle_bytes.__wrapped__
    assert 0 < measured() < 1000
    (tmp_path / "apps").rename(tmp_path / "checkouts")
    monkeypatch.setattr(round_log, "__file__", str(module).replace("apps", "checkouts"))
    assert measured() == 0


@pytest.mark.parametrize("number", [1, 2])
def test_one_unresponsive_node_does_not_end_a_run(number, caplog):
    """As many clients are asked as replies are needed; others are asked while it is skipped."""
    settings = {"clients_per_round": number, "min_replies": number}
    notes, _, _ = train_all(Unresponsive(1), rounds=6, timeout=0.2, **settings)
    assert [len(record["clients"]) >= number for record in notes.records] == [True] * 6
    rounds_without_reply = [record for record in notes.records if record["rejected"]]
    assert rounds_without_reply
    assert caplog.text.count("it asks") == len(rounds_without_reply)
    for record in rounds_without_reply:
        trained = {f"partition {c['partition-id']}" for c in record["clients"]}
        assert not trained & {entry["client"] for entry in record["rejected"]}


def test_a_disconnected_lying_node_does_not_block_a_resume():
    nodes = Nodes(3, own_data=True)
    nodes.registered[11] = registered_client(11, 2, own_data=True, num_partitions=1000)
    notes, _, _ = run(nodes, rounds=1, clients_per_round=3, evaluate_fn=lambda *_: None)
    assert notes.records[0]["partitions"] == 3


class Joining(Reconnecting):
    """Node 11 is connected alone for the first two polls, and claims to be the only node."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return [11] if self.looks <= 2 else super().get_node_ids()


@pytest.mark.parametrize(("before", "min_replies"), [(4, 1), (None, 3)])
def test_a_lying_node_that_connects_first_does_not_decide_alone(before, min_replies, monkeypatch):
    monkeypatch.setattr(recruiting, "NODES_TIMEOUT", 2.0)
    nodes = Joining()
    nodes.registered[11] = registered_client(11, 0, num_partitions=1)
    config = read_config(settings_from({"min_replies": min_replies}))
    client_registry = recruiting.ClientRegistry(config, loaded_of(), before)
    client_registry.recruit(nodes, wait=True)
    assert client_registry.partitions == 4
    assert client_registry.clients.keys() == {12, 13, 14}


def test_a_node_refused_for_its_examples_occupies_no_partition():
    nodes = Nodes()
    # It is asked first, with the partition of node 14.
    nodes.registered[11] = registered_client(11, 0, examples=2**40)
    strategy = strategy_with(nodes, lambda number: [10] * number, weighting="examples")
    strategy.federation.registry.recruit(nodes, wait=True)
    assert strategy.federation.registry.clients.keys() == {12, 13, 14}
    assert "expected 10" in strategy.federation.registry.refused[11]


def test_a_reconnecting_node_with_a_stuck_reply_uses_one_thread(monkeypatch):
    monkeypatch.setattr("ravan_flwr.server.waiting.MAX_FETCH_SECONDS", 0.1)
    over, threads = threading.Event(), []

    class Held(Reconnecting):
        in_process = False

        def pull_messages(self, message_ids):
            message = self._waiting.get(next(iter(message_ids)))
            if message is not None and message.metadata.dst_node_id == 12:
                over.wait(30)  # as for objects that are announced and never uploaded
                return []
            return super().pull_messages(message_ids)

    nodes = Held()
    late = nodes.registered.pop(12)

    def evaluate(number, _):
        nodes.registered[12], nodes.since = late, {12: str(number)}
        threads.append(threading.active_count())

    run(nodes, rounds=8, clients_per_round=3, evaluate_fn=evaluate)
    over.set()
    assert max(threads) - threads[0] <= 2


def test_a_slow_link_holds_few_threads(monkeypatch):
    """Replies share the link, which each takes for longer than others wait for a thread."""
    monkeypatch.setattr("ravan_flwr.server.waiting.MAX_FETCH_SECONDS", 0.01)
    link, threads, before = threading.Lock(), set(), threading.active_count()

    def fetch(_, message_id):
        threads.add(threading.active_count() - before)
        with link:
            threading.Event().wait(0.05)
        return message_id

    monkeypatch.setattr(waiting, "fetch", fetch)
    inbox: Any = waiting.ReplyFetcher()
    left = [str(number) for number in range(60)]
    while left:
        for message_id in inbox.fetch_ready(Remote(1), left):
            left.remove(message_id)
    assert max(threads) < 30


def test_the_end_of_an_earlier_thread_is_not_taken_for_that_of_the_present_one(monkeypatch):
    """Its caller had stopped early. Else one thread after the other would be started."""
    inbox, started, start = waiting.ReplyFetcher(), [], threading.Thread.start

    def start_and_join(thread):
        started.append(thread)
        assert len(started) < 5
        start(thread)
        thread.join()

    monkeypatch.setattr(threading.Thread, "start", start_and_join)
    inbox._came.put((waiting._DONE, threading.Event()))
    assert list(inbox.fetch_ready(Remote(1), [])) == []
    assert len(started) == 1


# Numbers of examples.


def strategy_with(nodes, partition_sizes=None, **settings):
    return strategy_of(nodes, read_config(settings_from(settings)), partition_sizes)


def weight(strategy, one):
    return strategy.federation.weight(one)


@pytest.mark.parametrize(
    "setting",
    [{"weighting": "examples"}, {"evaluate_on": "clients"}, {"local_steps": "epochs:1"}],
)
@pytest.mark.parametrize("own_data", [False, True])
def test_a_nodes_claim_must_equal_its_partition_size(setting, own_data):
    """A single node with data of its own is limited by the others, instead."""
    nodes = Nodes()
    nodes.registered[12] = registered_client(12, 2, own_data=own_data, examples=2**48)
    options = {"validation_share": 0.5, **setting}
    registry = strategy_with(nodes, lambda number: [10] * number, **options).federation.registry
    registry.recruit(nodes, wait=True)
    if own_data:
        examples = {m.partition_id: registry.examples(m) for m in registry.clients.values()}
        assert examples == {0: 10, 1: 10, 2: 100, 3: 10}
    else:
        assert registry.clients.keys() == {11, 13, 14}
        assert "examples is 281474976710656, expected 10" in registry.refused[12]


def test_steps_of_a_pass_are_counted_from_partitions_of_any_size():
    """The last client has forty times the others' examples: more than a claim would be allowed."""
    nodes, sizes = Nodes(), [10, 10, 10, 400]
    for node_id, node in nodes.registered.items():
        nodes.registered[node_id] = replace(node, examples=sizes[node.partition_id])
    settings = {"local_steps": "epochs:1", "batch_size": 10}
    federation = strategy_with(nodes, lambda _: sizes, **settings).federation
    federation.registry.recruit(nodes, wait=True)
    clients = federation.registry.clients.values()
    steps = {client.partition_id: federation.steps(client) for client in clients}
    assert steps == {0: 1, 1: 1, 2: 1, 3: 40}


def test_a_server_without_the_shared_data_logs_that_sizes_are_unchecked(caplog):
    def missing(number):
        raise ValueError("no such data set")

    nodes = Nodes()
    strategy = strategy_with(nodes, missing, weighting="examples")
    strategy.federation.registry.recruit(nodes, wait=True)
    strategy.federation.registry.recruit(nodes)
    assert len(strategy.federation.registry.clients) == 4
    assert caplog.text.count("are not checked: no such data set") == 1
    (first, *_) = strategy.federation.registry.clients.values()
    liar = replace(first, examples=2**40)
    assert weight(strategy, liar) == 100.0  # ten times the others' claims


def test_a_claim_of_own_examples_is_limited_by_the_others_or_the_operator():
    nodes = Nodes(own_data=True)
    nodes.registered[12] = registered_client(12, 2, own_data=True, examples=2**40)
    strategy = strategy_with(nodes, weighting="examples")
    strategy.federation.registry.recruit(nodes, wait=True)
    weights = {
        m.partition_id: weight(strategy, m) for m in strategy.federation.registry.clients.values()
    }
    assert weights == {0: 10.0, 1: 10.0, 2: 100.0, 3: 10.0}
    capped = strategy_with(nodes, weighting="examples", max_examples=7)
    capped.federation.registry.recruit(nodes, wait=True)
    assert {weight(capped, m) for m in capped.federation.registry.clients.values()} == {7.0}


def test_missing_and_absurd_claims_are_refused():
    answer = registered_client().as_config()
    for key in answer:
        with pytest.raises(ValueError, match=f"{key} is None, expected"):
            read_registered_client(1, {k: v for k, v in answer.items() if k != key})
    for key, value in (("examples", 2**62), ("num-partitions", 10**9)):
        with pytest.raises(ValueError, match=f"{key} is {value}, expected"):
            read_registered_client(1, answer | {key: value})
    with pytest.raises(ValueError, match="fingerprint has 100000 numbers, expected 2"):
        read_registered_client(1, answer | {"fingerprint": ["x"] * 100_000}, 2)
    client = read_registered_client(1, answer | {"device": "cpu\x1b[2K\r" + "x" * 10**6})
    assert client.device.startswith(r"cpu\x1b[2K\rxxx")
    assert len(client.device) <= 200


# Sums and bytes.


def test_a_mean_is_weighted():
    assert weighted_mean([1.0, 2.0, 4.0], [1.0, 2.0, 1.0]) == 2.25
    values = [0.1 * i for i in range(9)]
    assert weighted_mean(values, [1.0] * 9) == sum(values) / 9  # the same bits as the plain mean


class Counting(TorchFunctionMode):
    """Record the bytes of every tensor that is made, even if it is discarded."""

    def __init__(self):
        super().__init__()
        self.made: dict[int, int] = {}
        self._kept: list[Any] = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            storage = result.untyped_storage()
            self._kept.append(storage)  # so that no address is used twice
            self.made[storage.data_ptr()] = storage.nbytes()
        return result


@pytest.mark.parametrize("wire", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("shape", [(4, 3, 64, 64), (300, 301), (100_001,)])
def test_decoding_allocates_at_most_four_times_the_message(wire, shape):
    random = torch.Generator().manual_seed(0)
    coded = encode({"x": torch.randn(shape, generator=random)}, wire, random)
    sent = sum(tensor.nbytes for tensor in coded.values())
    own = {tensor.untyped_storage().data_ptr() for tensor in coded.values()}
    with Counting() as counting:
        plain = decode(coded, wire)
    assert plain["x"].shape == shape
    allocated = sum(size for where, size in counting.made.items() if where not in own)
    assert allocated <= 4 * sent + 4096


@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_an_oversized_upload_is_refused_before_it_is_decoded(wire):
    random = torch.Generator().manual_seed(0)
    coded = encode({"x": torch.ones(1000, 1000), "y": torch.ones(5)}, wire, random)
    with Counting() as counting, pytest.raises(ValueError, match="have 1000005 numbers, expected"):
        decode(coded, wire, max_numbers=1_000_004)
    assert sum(counting.made.values()) < 2**20
    assert decode(coded, wire, max_numbers=1_000_005)["x"].shape == (1000, 1000)


@pytest.mark.parametrize(
    ("settings", "partitions", "eligible", "expected"),
    [
        ({"limits": "min-replies=4"}, 20, 20, 4),
        ({"secure-aggregation": True}, 20, 20, 7),  # two thirds of clients-per-round
        ({"secure-aggregation": True}, 6, 6, 4),  # two thirds of all clients, which are fewer
        ({"secure-aggregation": True}, 9, 5, 9),  # all clients are connected
    ],
)
def test_a_round_waits_for_the_cohort_that_clients_accept(settings, partitions, eligible, expected):
    """Over a network; nodes connect one by one. The timeout is longer than any test."""
    clients: dict[int, Any] = {}

    def gather(_):
        number = len(clients)
        fraction = 1.0 if number < eligible else 0.5
        clients[number] = SimpleNamespace(partition_id=number, budget_fraction=fraction)

    registry: Any = SimpleNamespace(
        clients=clients, partitions=partitions, gather=gather, present=lambda _: [*clients.values()]
    )
    method: Any = SimpleNamespace(can_train=lambda fraction: fraction == 1.0)
    grid: Any = None
    round_log: Any = SimpleNamespace()
    gather(grid)
    config = read_config({"clients-per-round": 10} | settings)
    cohort = release_class(config).smallest_cohort
    Sampler(config, method, registry, cohort).wait(grid, round_log)
    assert len(clients) == expected


def test_messages_that_nobody_answers_are_not_kept():
    """Those of clients that were asked in addition have the arrays of their round's state."""
    nodes = Nodes()
    train_all(nodes, rounds=3, clients_per_round=2, over_sample=2.0)
    assert not nodes._waiting
    assert not nodes._last


class Later(Nodes):
    """Partition 1's reply to round 1 arrives in round 2."""

    in_process = False

    def __init__(self):
        super().__init__()
        self.late: list[Message] = []
        self.second_round = False

    def push_messages(self, messages):
        messages = list(messages)
        for message in messages:
            if message.metadata.message_type == "train":
                self.second_round |= message.content["config"]["round"] == 2
        return super().push_messages(messages)

    def pull_messages(self, message_ids):
        if self.second_round:
            yield from self.late
            self.late = []
        for reply in super().pull_messages(message_ids):
            node = self.registered[reply.metadata.src_node_id]
            if reply.metadata.message_type == "train" and node.partition_id == 1:
                self.late.append(reply)
            else:
                yield reply


def test_a_late_reply_is_recorded_and_is_no_second_fault():
    notes, strategy, _ = train_all(Later(), rounds=2, timeout=0.2, min_replies=3)
    first, second = ([entry["reason"] for entry in r["rejected"]] for r in notes.records)
    assert first == ["no reply within 0.2 s"]
    assert second == ["no reply within 0.2 s"]
    late = "late: a reply to round 1, which closed after 0.2 s"
    assert [entry["reason"] for entry in notes.records[1]["late"]] == [late]
    client = next(c for c in strategy.federation.registry.clients.values() if c.partition_id == 1)
    assert strategy.federation.registry.nodes[client.node_id].faults == 2  # one in each round
