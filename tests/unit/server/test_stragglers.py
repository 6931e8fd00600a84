"""Silent and slow nodes: how long a round waits, whom it asks, and what it knows of their data."""

import itertools
import math
import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import pytest
import torch
from flwr.proto.node_pb2 import NodeInfo
from torch.overrides import TorchFunctionMode

from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.registered_client import MOST_PARTITIONS, read_registered_client
from ravan_flwr.messages.wire import decode, encode
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server import round_log
from ravan_flwr.server.client_registry import MOST_LATE, Node
from ravan_flwr.server.reply_fetcher import RoundDeadline
from ravan_flwr.server.round_log import mean_of
from ravan_flwr.server.sampling import Sampler, sample
from tests.hand_made import (
    Nodes,
    Silent,
    impatient,
    loaded_of,
    registered_client,
    run,
    settings_from,
    strategy_of,
)

__all__ = ["impatient"]


class Clock:
    """`time.monotonic` that a test sets."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)


@pytest.mark.parametrize(
    ("given", "used_at", "ends_at"),
    [
        ({"clients": 4}, [1, 2, 3], 3600),  # no grace: today's behaviour
        ({"clients": 4, "least": 2, "grace": 30.0}, [5], 3600),
        ({"clients": 4, "least": 2, "grace": 30.0}, [5, 9], 39),
        ({"clients": 4, "least": 2, "grace": 30.0}, [5, 9, 20], 39),
        ({"clients": 4, "least": 9, "grace": 0.0}, [1, 2, 3, 4], 4),  # fewer than that are there
        ({"clients": 4, "grace": None}, [5], 3600),  # auto: half of those asked
        ({"clients": 4, "grace": None}, [5, 40], 440),
        ({"clients": 4, "grace": None}, [1, 2], 62),
        ({"clients": 4, "grace": None}, [1, 3000], 3600),
        ({"clients": 4, "least": 3, "grace": None}, [1, 2], 3600),
    ],
)
def test_when_a_round_is_over(given, used_at, ends_at, monkeypatch):
    clock = Clock(monkeypatch)
    patience = RoundDeadline(3600, **given)
    for clock.now in used_at:
        patience.use()
    clock.now = ends_at - 1
    assert patience.left == 1
    assert patience.seconds == ends_at


def test_enough_replies_end_a_round():
    patience = RoundDeadline(10, 4, enough=2)
    patience.use()
    assert not patience.satisfied
    patience.use()
    assert patience.satisfied


class Apart(Silent):
    """The same nodes, as over a network: replies are fetched, and rounds have a grace."""

    in_process = False


def test_a_silent_node_costs_the_grace_and_not_the_timeout():
    began = time.monotonic()
    notes, _, _ = run(
        Apart(1), rounds=1, timeout=60, clients_per_round=4, min_replies=3, straggler_grace=0.3,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    assert time.monotonic() - began < 10
    (record,) = notes.records
    assert [c["partition-id"] for c in record["clients"]] == [0, 2, 3]
    (rejected,) = record["rejected"]
    assert rejected["client"] == "partition 1"
    assert rejected["reason"].startswith("no reply within 0.3")


def test_who_is_silent_again_and_again_is_asked_less_often():
    nodes = Silent(1)
    notes, _, _ = run(
        nodes, rounds=8, timeout=0.2, clients_per_round=4, evaluate_fn=lambda *_: None
    )
    asked = [r["round"] for r in notes.records if r["rejected"]]
    assert asked == [1, 2, 4, 8]  # sits out 0, 1, 3 rounds
    resting = [r["round"] for r in notes.records if r["skipped"] == [1]]
    assert resting == [3, 5, 6, 7]


def test_who_answers_again_is_asked_in_every_round():
    node = Node(1)
    for number in (1, 2):
        node.note_missed_reply("train", number)
    assert [number for number in range(6) if not node.is_skipped("train", number)] == [4, 5]
    assert node.is_skipped("evaluate", 3)
    node.answered("train")
    assert node.failures == 0
    assert not node.is_skipped("train", 1)


class Mute(Nodes):
    """Partition 1 leaves messages of one kind without a reply, and answers all others."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def pull_messages(self, message_ids):
        message = self._waiting.get(next(iter(message_ids)))
        if message is None or message.metadata.message_type != self.kind:
            return super().pull_messages(message_ids)
        node = self.registered[message.metadata.dst_node_id]
        return [] if node.partition_id == 1 else super().pull_messages(message_ids)


@pytest.mark.parametrize(("kind", "sampled"), [("evaluate", 4), ("train", 2)])
def test_who_answers_one_kind_of_message_alone_is_asked_less_often_for_the_other(kind, sampled):
    notes, _, _ = run(
        Mute(kind), rounds=12, timeout=0.2, clients_per_round=sampled, evaluate_on="clients",
        validation_share=0.5,
    )  # fmt: skip
    asked = [r["round"] for r in notes.records if r["rejected"]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(asked)]
    assert len(asked) >= 3
    assert all(gap >= 2**k for k, gap in enumerate(gaps))


def test_of_one_silent_node_few_late_replies_are_looked_for():
    """It is spare in every round, and is never skipped for it."""
    _, strategy, _ = run(
        Apart(1), rounds=12, timeout=5.0, clients_per_round=2, over_sample=2.0, straggler_grace=0.2,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    late = sum(len(node.late) for node in strategy.registry.nodes.values())
    assert 1 <= late <= 2 * MOST_LATE  # of that one, and of one other


def test_all_are_asked_where_the_others_are_too_few():
    notes, _, _ = run(
        Silent(1, 2), rounds=4, timeout=0.2, clients_per_round=4, min_replies=2,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    assert [len(r["rejected"]) for r in notes.records] == [2, 2, 0, 2]
    with pytest.raises(RuntimeError, match="got 2 valid replies, expected at least min-replies"):
        run(
            Silent(1, 2), rounds=1, timeout=0.2, clients_per_round=4, min_replies=3,
            evaluate_fn=lambda *_: None,
        )  # fmt: skip


def test_more_clients_are_asked_than_are_used():
    given: dict[str, Any] = {"clients_per_round": 2, "evaluate_fn": lambda *_: None, "rounds": 3}
    plain, _, _ = run(Nodes(), **given)
    notes, _, _ = run(Nodes(), over_sample=1.5, **given)
    for record, state, other in zip(notes.records, notes.states, plain.states, strict=True):
        assert torch.equal(state["H"], other["H"])  # in process the same come first
        assert (len(record["clients"]), len(record["unused"])) == (2, 1)
        assert not record["rejected"]


@pytest.mark.parametrize("here", [True, False])
def test_late_replies_are_looked_for_where_they_can_come(here):
    """In one process a client would be run for the round before, in the time of this one."""

    class Watched(Silent):
        in_process = here
        pushed, looked_for = 0, 0

        def push_messages(self, messages):
            Watched.pushed += 1
            self.ids = set(super().push_messages(messages))
            return self.ids

        def pull_messages(self, message_ids):
            wanted = set(message_ids)
            Watched.looked_for += bool(wanted - self.ids)
            return super().pull_messages(wanted)

    run(
        Watched(1, 2), rounds=2, timeout=0.2, clients_per_round=4, min_replies=2,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    assert Watched.pushed >= 3
    assert bool(Watched.looked_for) != here


def test_spare_clients_take_the_place_of_silent_ones():
    notes, _, _ = run(
        Silent(0, 1), rounds=1, timeout=1.0, clients_per_round=2, over_sample=2.0,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    assert [c["partition-id"] for c in notes.records[0]["clients"]] == [2, 3]
    assert sorted(notes.records[0]["unused"]) == [0, 1]


def test_spare_ones_do_not_change_who_is_sampled():
    clients = [registered_client(i, i, num_partitions=10) for i in range(10)]
    for number in range(50):
        alone, more = sample(clients, 3, 0, number), sample(clients, 3, 0, number, reserve=4)
        assert more[:3] == alone
        assert len({m.partition_id for m in more}) == 7


# Who is who.


class Comes(Nodes):
    """Nodes whose moment of coming a test sets."""

    since: dict[int, str]

    def get_nodes(self):
        for node_id in self.get_node_ids():
            moment = getattr(self, "since", {}).get(node_id, "then")
            yield NodeInfo(node_id=node_id, last_activated_at=moment)


def test_who_comes_back_with_anothers_part_does_not_evict_its_holder():
    """Node 11 is the first in every dict, and comes back again and again with node 14's part."""
    nodes = Comes()

    def evaluate(number, _):
        nodes.registered[11] = registered_client(11, 0)
        nodes.since = {11: str(number)}
        if number == 3:  # the holder was away, and comes back, too
            nodes.since[14] = "later"

    notes, strategy, _ = run(nodes, rounds=6, clients_per_round=4, evaluate_fn=evaluate)
    trained = [[c["partition-id"] for c in record["clients"]] for record in notes.records]
    assert trained == [[0, 1, 2, 3]] + [[0, 1, 2]] * 5
    assert strategy.registry.clients.keys() == {12, 13, 14}
    assert "partition-id 0 is taken by node 14" in strategy.registry.refused[11]


class Keyed(Comes):
    """Each node has a key: node 1x that of the number x, unless `keys` says another."""

    in_process = False
    keys: ClassVar[dict[int, bytes]] = {}
    run: Any = SimpleNamespace(primary_task_type="")  # no simulation

    def get_nodes(self):
        for info in super().get_nodes():
            info.public_key = self.keys.get(info.node_id, b"key %d" % info.node_id)
            yield info


def test_a_partition_belongs_to_the_key_that_had_it_when_a_run_is_resumed(caplog, tmp_path):
    nodes = Keyed()
    _, first, _ = run(nodes, rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None)
    directory = RunDirectory(tmp_path)
    directory.write_node_keys(first.registry.owners)
    owners = directory.read_node_keys()
    assert set(owners) == {0, 1, 2, 3}
    assert len(set(owners.values())) == 4

    class Stolen(Keyed):  # before its holder, node 14, is there: it is away
        keys: ClassVar[dict[int, bytes]] = {14: b"of somebody else"}

    _, again, _ = run(
        Stolen(), rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None, owners=owners
    )
    assert "partition-id 0 belongs to a node with another key" in again.registry.refused[14]
    assert "node-keys.json" in again.registry.refused[14]
    assert again.registry.clients.keys() == {11, 12, 13}
    assert again.registry.owners == owners

    class AllNew(Keyed):  # SuperNodes without keys of their own have new ones after a restart
        keys: ClassVar[dict[int, bytes]] = {n: b"new %d" % n for n in (11, 12, 13, 14)}

    _, new, _ = run(
        AllNew(), rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None, owners=owners
    )
    assert not new.registry.refused
    assert "no node has its earlier key" in caplog.text


def test_who_moves_to_a_free_part_leaves_the_old_one():
    nodes = Comes()
    del nodes.registered[14]  # partition 0

    def evaluate(number, _):
        if number == 1:
            nodes.registered[11], nodes.since = registered_client(11, 0), {11: "again"}
        if number == 2:
            nodes.registered[15] = registered_client(15, 3)

    notes, strategy, _ = run(nodes, rounds=4, clients_per_round=4, evaluate_fn=evaluate)
    assert [c["partition-id"] for c in notes.records[-1]["clients"]] == [0, 1, 2, 3]
    assert not strategy.registry.refused


def test_bytes_on_the_links_are_estimated_where_there_are_links(monkeypatch):
    """Beside the payload: calls, what waits, and the app bundle, once for each node."""
    monkeypatch.setattr(round_log, "bundle_bytes", lambda: 10**9)
    notes, _, _ = run(Keyed(), clients_per_round=2, evaluate_fn=lambda *_: None)
    first, second = (record["link-bytes-estimate"] for record in notes.records)
    payload = [record["bytes-up"] + record["bytes-down"] for record in notes.records]
    travels = round_log.FRAMES * payload[0] + round_log.FRAMES * 4 * 10**9
    assert first - travels >= 6 * round_log.MESSAGE_BYTES  # four are queried
    assert 0 < second - round_log.FRAMES * payload[1] - 2 * round_log.MESSAGE_BYTES < 10**6
    notes, _, _ = run(Comes(), clients_per_round=2, evaluate_fn=lambda *_: None)
    assert "link-bytes-estimate" not in notes.records[0]


def test_the_bundle_is_measured_where_an_app_runs_from_one(monkeypatch, tmp_path):
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
def test_one_node_that_is_silent_does_not_end_a_run(number, caplog):
    """As many are asked as replies are needed: in its rounds others are asked in its place."""
    notes, _, _ = run(
        Silent(1), rounds=6, timeout=0.2, clients_per_round=number, min_replies=number,
        evaluate_fn=lambda *_: None,
    )  # fmt: skip
    assert [len(record["clients"]) >= number for record in notes.records] == [True] * 6
    silent = [record for record in notes.records if record["rejected"]]
    assert silent
    assert caplog.text.count("it asks") == len(silent)
    for record in silent:
        trained = {f"partition {c['partition-id']}" for c in record["clients"]}
        assert not trained & {one["client"] for one in record["rejected"]}


@pytest.mark.parametrize(
    ("liar", "parts"),
    [
        ({"own_data": True, "num_partitions": 1000}, 4),  # has no say
        ({"num_partitions": 1000}, 4),
        ({"num_partitions": 2 * MOST_PARTITIONS}, 4),
    ],
)
def test_one_liar_does_not_decide_how_the_data_is_dealt_out(liar, parts):
    nodes = Nodes()
    nodes.registered[11] = registered_client(11, 3, **liar)
    notes, strategy, _ = run(nodes, rounds=1, clients_per_round=4, evaluate_fn=lambda *_: None)
    assert strategy.registry.partitions == notes.records[0]["partitions"] == parts
    assert {12, 13, 14} <= strategy.registry.clients.keys()


def test_of_two_that_differ_the_one_is_believed_that_fits_what_is_there():
    nodes = Nodes(2)
    nodes.registered[11] = registered_client(11, 1, num_partitions=10_000)
    _, strategy, _ = run(nodes, rounds=1, clients_per_round=2, evaluate_fn=lambda *_: None)
    assert strategy.registry.clients.keys() == {12}
    assert strategy.registry.partitions == 2


def test_a_liar_that_is_gone_does_not_block_a_resume():
    nodes = Nodes(3, own_data=True)
    nodes.registered[11] = registered_client(11, 2, own_data=True, num_partitions=1000)
    notes, _, _ = run(nodes, rounds=1, clients_per_round=3, evaluate_fn=lambda *_: None)
    assert notes.records[0]["partitions"] == 3


class Joins(Comes):
    """Node 11 is there alone for the first two looks, and says that it is all there is."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return [11] if self.looks <= 2 else super().get_node_ids()


@pytest.mark.parametrize(("before", "least"), [(4, 1), (None, 3)])
def test_a_liar_that_is_there_first_does_not_decide_alone(before, least, monkeypatch):
    monkeypatch.setattr(recruiting, "NODES_TIMEOUT", 2.0)
    nodes = Joins()
    nodes.registered[11] = registered_client(11, 0, num_partitions=1)
    config = read_config(settings_from({"min_replies": least}))
    client_registry = recruiting.ClientRegistry(config, loaded_of(), before)
    client_registry.recruit(nodes, wait=True)
    assert client_registry.partitions == 4
    assert client_registry.clients.keys() == {12, 13, 14}


def test_who_is_refused_for_its_examples_has_nobodys_part():
    nodes = Nodes()
    nodes.registered[11] = registered_client(
        11, 0, examples=2**40
    )  # asked first, with node 14's part
    strategy = strategy_with(nodes, lambda number: [10] * number, weighting="examples")
    strategy.registry.recruit(nodes, wait=True)
    assert strategy.registry.clients.keys() == {12, 13, 14}
    assert "expected 10" in strategy.registry.refused[11]


def test_who_comes_and_goes_with_an_answer_that_never_comes_keeps_one_thread(monkeypatch):
    monkeypatch.setattr("ravan_flwr.server.reply_fetcher.STUCK", 0.1)
    over, threads = threading.Event(), []

    class Held(Comes):
        in_process = False

        def pull_messages(self, message_ids):
            message = self._waiting.get(next(iter(message_ids)))
            if message is not None and message.metadata.dst_node_id == 12:
                over.wait(30)  # as for objects that were told of and are never uploaded
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


# How many examples.


def strategy_with(nodes, partition_sizes=None, **settings):
    return strategy_of(nodes, read_config(settings_from(settings)), partition_sizes)


def weight(strategy, one):
    return strategy.open_round(1).kind.weight(one)


@pytest.mark.parametrize("setting", [{"weighting": "examples"}, {"evaluate_on": "clients"}])
def test_what_the_server_dealt_out_is_what_a_node_has(setting):
    nodes = Nodes()
    nodes.registered[12] = registered_client(12, 2, examples=2**40)
    given = {"validation_share": 0.5, **setting}
    strategy = strategy_with(nodes, lambda number: [10] * number, **given)
    strategy.registry.recruit(nodes, wait=True)
    assert strategy.registry.clients.keys() == {11, 13, 14}
    assert "examples is 1099511627776, expected 10" in strategy.registry.refused[12]


def test_a_server_without_the_shared_data_says_that_nothing_is_checked(caplog):
    def missing(number):
        raise ValueError("no such data set")

    nodes = Nodes()
    strategy = strategy_with(nodes, missing, weighting="examples")
    strategy.registry.recruit(nodes, wait=True)
    strategy.registry.recruit(nodes)
    assert len(strategy.registry.clients) == 4
    assert caplog.text.count("are not checked: no such data set") == 1
    (first, *_) = strategy.registry.clients.values()
    liar = replace(first, examples=2**40)
    assert weight(strategy, liar) == 100.0  # ten times what the others say


def test_own_examples_count_as_many_as_the_others_have_or_as_the_operator_says():
    nodes = Nodes(own_data=True)
    nodes.registered[12] = registered_client(12, 2, own_data=True, examples=2**40)
    strategy = strategy_with(nodes, weighting="examples")
    strategy.registry.recruit(nodes, wait=True)
    weights = {m.partition_id: weight(strategy, m) for m in strategy.registry.clients.values()}
    assert weights == {0: 10.0, 1: 10.0, 2: 100.0, 3: 10.0}
    capped = strategy_with(nodes, weighting="examples", max_examples=7)
    capped.registry.recruit(nodes, wait=True)
    assert {weight(capped, m) for m in capped.registry.clients.values()} == {7.0}


@pytest.mark.parametrize("setting", [{"weighting": "examples"}, {"evaluate_on": "clients"}])
def test_who_alone_has_data_of_its_own_is_no_measure_of_itself(setting):
    nodes = Nodes()
    nodes.registered[12] = registered_client(12, 2, own_data=True, examples=2**48)
    given = {"validation_share": 0.5, **setting}
    strategy = strategy_with(nodes, lambda number: [10] * number, **given)
    strategy.registry.recruit(nodes, wait=True)
    counted = {
        m.partition_id: strategy.registry.examples(m) for m in strategy.registry.clients.values()
    }
    assert counted == {0: 10, 1: 10, 2: 100, 3: 10}


def test_no_claim_is_beyond_all_bounds():
    answer = registered_client().as_config()
    for key, value in (("examples", 2**62), ("num-partitions", 10**9)):
        with pytest.raises(ValueError, match=f"{key} is {value}, expected"):
            read_registered_client(1, answer | {key: value})
    with pytest.raises(ValueError, match="derived has 100000 numbers, expected 2"):
        read_registered_client(1, answer | {"derived": ["x"] * 100_000}, 2)
    told = read_registered_client(1, answer | {"device": "cpu\x1b[2K\r" + "x" * 10**6})
    assert told.device.startswith(r"cpu\x1b[2K\rxxx")
    assert len(told.device) <= 200


# Sums and bytes.


def test_a_mean_is_weighted():
    assert mean_of([1.0, 2.0, 4.0], [1.0, 2.0, 1.0]) == 2.25
    values = [0.1 * i for i in range(9)]
    assert mean_of(values, [1.0] * 9) == sum(values) / 9  # the same bits as the plain mean


class Counting(TorchFunctionMode):
    """The bytes of every tensor that is made, whether or not it is kept."""

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
def test_decoding_makes_no_more_than_four_times_what_was_sent(wire, shape):
    random = torch.Generator().manual_seed(0)
    coded = encode({"x": torch.randn(shape, generator=random)}, wire, random)
    sent = sum(tensor.nbytes for tensor in coded.values())
    own = {tensor.untyped_storage().data_ptr() for tensor in coded.values()}
    with Counting() as counting:
        plain = decode(coded, wire)
    assert plain["x"].shape == shape
    made = sum(size for where, size in counting.made.items() if where not in own)
    assert made <= 4 * sent + 4096


@pytest.mark.parametrize("wire", ["float16", "int8"])
def test_what_no_upload_has_is_refused_before_it_is_decoded(wire):
    random = torch.Generator().manual_seed(0)
    coded = encode({"x": torch.ones(1000, 1000), "y": torch.ones(5)}, wire, random)
    with Counting() as counting, pytest.raises(ValueError, match="have 1000005 numbers, expected"):
        decode(coded, wire, most=1_000_004)
    assert sum(counting.made.values()) < 2**20
    assert decode(coded, wire, most=1_000_005)["x"].shape == (1000, 1000)


def test_the_seconds_of_a_grace_may_be_any():
    assert math.isinf(RoundDeadline(math.inf, 1).left)


@pytest.mark.parametrize(
    ("settings", "partitions", "can", "came"),
    [
        ({"limits": "min-replies=4"}, 20, 20, 4),
        ({"secure-aggregation": True}, 20, 20, 7),  # two thirds of clients-per-round
        ({"secure-aggregation": True}, 6, 6, 4),  # of all, which are fewer
        ({"secure-aggregation": True}, 9, 5, 9),  # all are here: nobody else can come
    ],
)
def test_a_round_waits_for_the_cohort_that_clients_accept(settings, partitions, can, came):
    """Over a network; nodes come one by one. The time-out is longer than any test."""
    clients: dict[int, Any] = {}

    def gather(_):
        number = len(clients)
        clients[number] = SimpleNamespace(
            partition_id=number, budget_fraction=1.0 if number < can else 0.5
        )

    def present(_):
        return list(clients.values())

    client_registry = SimpleNamespace(
        clients=clients, partitions=partitions, gather=gather, present=present
    )
    method = SimpleNamespace(can_train=lambda fraction: fraction == 1.0)
    config = read_config({"clients-per-round": 10} | settings)
    gather(None)
    sampler = Sampler(config, cast(Any, method), cast(Any, client_registry))
    sampler.wait(cast(Any, None), cast(Any, SimpleNamespace()))
    assert len(clients) == came
