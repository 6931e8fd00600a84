"""Asynchronous rounds: exact without staleness, FedBuff's weights with it."""

import math
import threading
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.timed_grid import TimedGrid
from ravan_flwr.methods import METHODS
from ravan_flwr.server.aggregation import rebase
from ravan_flwr.server.releases import weigh_staleness
from ravan_flwr.simulated_time.clock import SimulatedClock
from ravan_flwr.simulated_time.devices import Device
from tests.hand_made import Nodes, fake_clock, run  # noqa: F401 (a fixture)
from tests.methods import aggregate, build, some_state, train_client

ABLE = [name for name, method in METHODS.items() if method.asynchronous and name != "none"]


@pytest.mark.parametrize("method", ABLE)
def test_a_buffer_of_all_clients_is_a_synchronous_round(method):
    settings = {"method": method, "clients_per_round": 4}
    one, _, _ = run(Nodes(method=method), 3, **settings)
    other, _, _ = run(Nodes(method=method), 3, aggregation="async", **settings)
    for state, same in zip(one.states, other.states, strict=True):
        assert all(tensor.equal(same[name]) for name, tensor in state.items())
    assert not any("staleness" in c for r in other.records for c in r["clients"])


@pytest.mark.parametrize("method", ABLE)
@pytest.mark.parametrize("fraction", [1.0, 0.5])
def test_a_rebased_upload_applies_its_change_to_the_current_state(method, fraction):
    """Compare with a plain loop: the state of the upload alone, minus then, weighted, plus now."""
    method_, adapters = build(method)
    fraction = fraction if method_.can_train(fraction) else 1.0
    then, now = some_state(method_, adapters, 1), some_state(method_, adapters, 9)
    upload = train_client(method_, adapters, then, fraction, 5)
    got = aggregate(method_, now, [(rebase(method_, upload, fraction, then, now, 0.5), fraction)])
    alone = aggregate(method_, then, [(upload, fraction)])
    for name, tensor in now.items():
        expected = tensor.double() + 0.5 * (alone[name].double() - then[name].double())
        torch.testing.assert_close(got[name].double(), expected, rtol=1e-5, atol=1e-6)


def test_staleness_weights_equal_the_papers():
    assert [weigh_staleness(s) for s in (0, 3, 8)] == pytest.approx([1.0, 0.5, 1 / 3])


@given(st.permutations(range(4)))
@pytest.mark.parametrize("method", ABLE)
def test_the_order_within_a_buffer_does_not_matter(method, order):
    method_, adapters = build(method)
    states = [some_state(method_, adapters, seed) for seed in range(4)]
    uploads = []
    for age, then in enumerate(states):
        upload = train_client(method_, adapters, then, 1.0, 7 + age)
        weight = weigh_staleness(age)
        uploads.append((rebase(method_, upload, 1.0, then, states[0], weight), 1.0))
    expected = aggregate(method_, states[0], uploads)
    got = aggregate(method_, states[0], [uploads[i] for i in order])
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-6, atol=1e-7)


class Timed(TimedGrid, Nodes):
    """Hand-made nodes whose devices take a given number of seconds for any message."""

    def __init__(self, seconds, behave=None):
        Nodes.__init__(self, len(seconds), behave)
        self.clock = SimulatedClock([Device("d", 1 / s, math.inf, math.inf) for s in seconds])
        fits = SimpleNamespace(memory_shortage=lambda fraction, client: "")
        self._work: Any = fits

    def get_node_ids(self):
        return list(self.registered)

    def get_nodes(self):
        return self._listed(self.registered)

    def _begin(self, message_id, message):
        if message.metadata.message_type == "train":
            partition = self.registered[message.metadata.dst_node_id].partition_id
            self.clock.send(message_id, partition, 0, 1.0, 0)


ASYNC: dict[str, Any] = {"aggregation": "async", "buffer_size": 1, "concurrency": 3}
ASYNC |= {"clients_per_round": 3, "evaluate_fn": lambda *_: None}


def rejections(notes):
    return [entry for record in notes.records for entry in record["rejected"]]


def test_three_clients_by_hand():
    """They take 1, 2.5 and 4 s; each client that has answered is sent the next version.

    0 ends at 1, 2 and 3 s, 1 at 2.5 s and 2 at 4 s. At 4 s 0 answers first: it was sent earlier.
    """
    notes, strategy, _ = run(Timed([1.0, 2.5, 4.0]), 5, timeout=100.0, **ASYNC)
    used = [(r["time"], c["partition-id"], c.get("staleness", 0)) for r in notes.records
            for c in r["clients"]]  # fmt: skip
    assert used == [(1.0, 0, 0), (2.0, 0, 0), (2.5, 1, 2), (3.0, 0, 1), (4.0, 2, 4)]
    assert sorted(strategy.transport.versions) == [4, 5]


@pytest.mark.parametrize("seconds", [[3.0, 1.0, 2.0], [2.0, 3.0, 1.0]])
def test_clients_may_answer_in_any_order(seconds):
    settings = ASYNC | {"buffer_size": 3}
    (one, _, _), (other, _, _) = (
        run(Timed(each), 1, timeout=100.0, **settings) for each in ([1.0, 2.0, 3.0], seconds)
    )
    for name, tensor in one.states[0].items():
        torch.testing.assert_close(other.states[0][name], tensor, rtol=1e-6, atol=1e-7)


def test_an_update_that_is_too_stale_is_rejected():
    notes, strategy, _ = run(Timed([1.0, 2.5, 9.0]), 12, timeout=100.0, max_staleness=3, **ASYNC)
    rejected = rejections(notes)
    assert len(rejected) >= 1
    assert "expected at most max-staleness = 3" in rejected[0]["reason"]
    assert min(strategy.transport.versions) >= 12 - 3


def test_a_false_version_rejects_its_own_reply():
    class Liar(Timed):
        def reply(self, message, upload, number):
            lies = self.registered[message.metadata.dst_node_id].partition_id == 1
            return super().reply(message, upload, number + lies)

    nodes = Liar([1.0, 1.5, 2.0])
    notes, _, _ = run(nodes, 6, timeout=100.0, **ASYNC)
    rejected = rejections(notes)
    assert {entry["client"] for entry in rejected} == {"partition 1"}
    assert "reply is of round" in rejected[0]["reason"]
    assert {c["partition-id"] for r in notes.records for c in r["clients"]} == {0, 2}


class Remote(Nodes):
    """Nodes whose replies are fetched by threads, as in a deployment, and arrive twice."""

    in_process = False

    def pull_messages(self, message_ids):
        return 2 * list(super().pull_messages(message_ids))


def test_replies_are_fetched_and_a_duplicate_counts_once():
    """Also a reply that a thread has fetched when an evaluation begins."""
    settings = ASYNC | {"evaluate_fn": None, "evaluate_on": "clients", "validation_share": 0.5}
    notes, _, _ = run(Remote(3), 30, **settings)
    assert [len(record["clients"]) for record in notes.records] == [1] * 30
    assert not rejections(notes)
    used = [(r["round"], c) for r in notes.records for c in r["clients"]]
    ages = [c.get("staleness", 0) for _, c in used]
    clients = {(c["partition-id"], n - age) for (n, c), age in zip(used, ages, strict=True)}
    assert len(clients) == len(used)
    assert max(ages) < 10


def test_an_unresponsive_client_occupies_its_place_until_the_timeout():
    notes, _, _ = run(Timed([1.0, 1.5, 1e6]), 12, timeout=5.0, **ASYNC)
    rejected = rejections(notes)
    assert rejected[0] == {"client": "partition 2", "reason": "no reply within 5 s"}
    assert len(notes.records) == 12


def test_an_unresponsive_client_is_asked_less_often():
    """After k timeouts in a row it is skipped for 2^(k-1) - 1 versions."""
    asked = []

    class Noting(Timed):
        def _begin(self, message_id, message):
            super()._begin(message_id, message)
            partition = self.registered[message.metadata.dst_node_id].partition_id
            if message.metadata.message_type == "train" and partition == 3:
                asked.append(int(message.metadata.group_id))

    settings = ASYNC | {"concurrency": 4, "clients_per_round": 4, "max_update_norm": 1e30}
    notes, _, _ = run(Noting([1.0, 1.5, 2.0, 1e6]), 60, timeout=5.0, **settings)
    given_up = [r["round"] for r in notes.records for _ in r["rejected"]]
    assert len(given_up) >= 4
    assert asked[0] == 1
    for k, (last, again) in enumerate(zip(given_up, asked[1:], strict=False)):
        assert again >= last + 2**k


def test_when_every_reply_is_bad_the_run_stops():
    class Broken(Timed):
        def reply(self, *given):
            reply = super().reply(*given)
            del reply.content["arrays"]
            return reply

    with pytest.raises(RuntimeError, match="round 1: got no valid reply"):
        run(Broken([1.0, 1.5, 2.0]), 3, timeout=100.0, **ASYNC)


# Five of eight clients send what is of no use, or nothing.
@pytest.mark.parametrize("aggregation", ["sync", "async"])
@pytest.mark.parametrize("seconds", [1.0, 1e6])
def test_clients_that_fail_do_not_end_a_run_while_others_can_be_asked(seconds, aggregation):
    class Broken(Timed):
        def reply(self, message, upload, number):
            reply = super().reply(message, upload, number)
            if self.registered[message.metadata.dst_node_id].partition_id < 5:
                del reply.content["arrays"]
            return reply

    nodes = Broken([seconds] * 5 + [20.0] * 3)
    settings = ASYNC | {"aggregation": aggregation, "buffer_size": 1 + (aggregation == "async")}
    notes, _, _ = run(nodes, 4, timeout=100.0, min_replies=2, **settings)
    for record in notes.records:
        used = {client["partition-id"] for client in record["clients"]}
        assert len(used) >= 2
        assert used <= {5, 6, 7}
    assert rejections(notes)


ASYNCHRONOUS = [name for name, method in METHODS.items() if method.asynchronous]


@pytest.mark.parametrize(
    "settings", [{"weighting": "krum"}, {"min_replies": 5}, {"min_replies": 5, "method": "fed-sb"}]
)
def test_a_buffer_may_be_larger_than_clients_per_round(settings):
    """So may `min-replies`, also in the calibration round of Fed-SB, which asks more clients."""
    nodes = Nodes(6, method=settings.get("method", "ravan"))
    notes, *_ = run(
        nodes, 3, clients_per_round=3, aggregation="async", buffer_size=5, concurrency=6,
        evaluate_fn=lambda *_: None, **settings,
    )  # fmt: skip
    assert [len(r["clients"]) for r in notes.records if r["round"]] == [5, 5, 5]
    assert all(len(r["clients"]) >= 5 and not r["rejected"] for r in notes.records)


# Other contradictions are in tests/unit/config/test_checks.py.
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"method": "hetlora"}, f"'hetlora', expected one of {', '.join(ASYNCHRONOUS)}, since"),
        ({"privacy": "client", "epsilon": 8.0}, "got privacy = 'client', expected 'none', since"),
        ({"concurrency": 20, "max-staleness": 3}, "max-staleness = 3: .* expected at least 6"),
        ({"budgets": "by-speed:9"}, "budgets = 'by-speed:9': got devices = 'auto'"),
    ],
)
def test_settings_incompatible_with_asynchronous_rounds_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        read_config({"aggregation": "async", **settings})


def test_a_reply_after_its_timeout_is_still_expected_over_a_network():
    """Its bytes count, and the record has it, when it comes."""

    class Silent(Remote):
        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                node = self.registered[reply.metadata.src_node_id]
                if reply.metadata.message_type != "train" or node.partition_id != 2:
                    yield reply

    _, strategy, _ = run(Silent(3), 2, timeout=0.2, **ASYNC | {"buffer_size": 3})
    client = next(c for c in strategy.federation.registry.clients.values() if c.partition_id == 2)
    reasons = [
        reason for _, reason in strategy.federation.registry.nodes[client.node_id].late.values()
    ]
    assert reasons[0] == "late: an update of version 1, after 0.2 s"


def test_replies_that_arrive_during_a_long_evaluation_are_used():
    """The server evaluates for 10 s, and clients that answered at once have 5 s."""
    settings = ASYNC | {"evaluate_fn": lambda *_: time.sleep(10.0)}
    notes, strategy, _ = run(Remote(3), 6, timeout=5.0, **settings)
    assert not rejections(notes)
    assert not any(node.missed_replies for node in strategy.federation.registry.nodes.values())


def test_a_late_reply_is_recorded_although_clients_do_not_evaluate(monkeypatch):
    """Partition 2 answers its first message when its timeout of 5 s is over."""
    fake = time.sleep

    def sleep(seconds):  # the threads that fetch replies get some real time as well
        fake(seconds)
        threading.Event().wait(0.01)

    monkeypatch.setattr(time, "sleep", sleep)

    class Late(Remote):
        held: ClassVar[dict[str, Message]] = {}

        def pull_messages(self, message_ids):
            for reply in super().pull_messages(message_ids):
                node, metadata = self.registered[reply.metadata.src_node_id], reply.metadata
                if metadata.message_type == "train" and node.partition_id == 2:
                    self.held.setdefault(metadata.reply_to_message_id, reply)
                else:
                    yield reply
            if time.monotonic() > 7.5:
                yield from (self.held.pop(one) for one in message_ids if one in self.held)

    notes, _, _ = run(Late(3), 10, timeout=5.0, **ASYNC | {"buffer_size": 3})
    reasons = [entry["reason"] for entry in rejections(notes) if entry["client"] == "partition 2"]
    assert reasons[0] == "no reply within 5 s"
    late = [entry for record in notes.records for entry in record.get("late", ())]
    assert {"client": "partition 2", "reason": "late: an update of version 1, after 5 s"} in late
    assert not any(reason.startswith("late") for reason in reasons)
    assert all({c["partition-id"] for c in r["clients"]} >= {0, 1} for r in notes.records)
