"""One hostile node of four: its reply is rejected, and no other is affected."""

import functools
import itertools
import json
import math
import os
import random
import re
import threading
import time
import tracemalloc

import httpx
import pytest
import torch
from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.messages.arrays import STYPE, array_bytes, from_record, to_record
from ravan_flwr.messages.plain_text import plain, shown
from ravan_flwr.messages.wire import decode, encode
from ravan_flwr.server.superlink_calls import (
    ALWAYS_ROOM,
    MAX_EXPANSION,
    check_objects,
    fetch,
    install_object_check,
)
from ravan_flwr.server.update import read_trained
from ravan_flwr.server.update_norm_check import UpdateNormCheck, measure_changes
from ravan_flwr.server.waiting import ReplyFetcher, RoundDeadline, pull_replies
from tests.attackers import ATTACKERS, Attacked, Attacker, Uploads, mutated, objects_of, with_body
from tests.hand_made import (
    FINGERPRINT,
    METRICS,
    Nodes,
    as_reply,
    fake_clock,
    registered_client,
    run,
)
from tests.methods import train_client

__all__ = ["fake_clock"]

# Rounds of all clients, without an evaluation.
train_all = functools.partial(run, clients_per_round=4, evaluate_fn=lambda *_: None)

ENVELOPES = int(os.environ.get("RAVAN_ENVELOPES", "10000"))


@pytest.mark.parametrize("behaviour", ATTACKERS, ids=lambda one: one.__name__)
def test_a_hostile_reply_is_rejected_and_no_other_is_affected(behaviour, caplog):
    attacker = behaviour()
    settings = {"rounds": 2, "clients_per_round": 4, "evaluate_on": "clients"}
    notes, _, _ = run(Attacked(attacker), validation_share=0.5, **settings)
    assert time.monotonic() < 20  # of the fake clock, which the server's waiting advances
    assert len(notes.records) == 2
    honest = Nodes()
    if attacker.kind == "train" and attacker.reason:
        del honest.registered[12]  # partition 2
    expected, _, _ = run(honest, validation_share=0.5, **settings)
    for record, state, alone in zip(notes.records, notes.states, expected.states, strict=True):
        assert all(torch.equal(state[name], alone[name]) for name in alone)
        assert len(record["rejected"]) == (1 if attacker.reason else 0)
        for one in record["rejected"]:
            assert one["client"] == "partition 2"
            assert re.search(attacker.reason, one["reason"]), one["reason"]
            assert len(one["reason"]) <= 500
        json.dumps(record, allow_nan=False)
    assert all("\x1b" not in line and "\n" not in line for line in caplog.messages)


class BadAnswer(Attacker):
    kind = "query"

    def reply(self, honest, message):
        raise KeyError("no such object")


def test_an_invalid_answer_to_the_query_refuses_its_node_alone():
    _, strategy, _ = train_all(Attacked(BadAnswer()), rounds=1)
    assert strategy.federation.registry.clients.keys() == {11, 13, 14}
    assert "cannot be read: KeyError" in strategy.federation.registry.refused[12]


class Opposite(Attacker):
    """Send the opposite of the honest change, ten times as large: no limit rejects it here."""

    def reply(self, honest, message):
        sent, upload = from_record(message.content["arrays"]), from_record(honest.content["arrays"])
        for name in ("B", "A"):
            upload[name] = sent[name] - 10 * (upload[name] - sent[name])
        honest.content["arrays"] = to_record(upload)
        return honest


@pytest.mark.parametrize(("weighting", "taken"), [("krum", 1), ("multi-krum", 5)])
def test_a_false_reply_that_no_check_rejects_is_outvoted_by_krum(weighting, taken):
    """Of seven replies f = 2 may be false. Multi-Krum averages five of the six honest ones."""
    settings = {"rounds": 2, "clients_per_round": 7, "method": "fedit"}
    nodes = Attacked(Opposite(), number=7, method="fedit")
    notes, _, _ = train_all(nodes, weighting=weighting, **settings)
    state = nodes.method.initial_state(nodes.adapters)
    for record, new in zip(notes.records, notes.states, strict=True):
        assert (len(record["clients"]), record["rejected"]) == (7, [])
        honest = [
            train_client(nodes.method, nodes.adapters, state, 1.0, partition)
            for partition in (0, 1, 3, 4, 5, 6)  # the attacker has partition 2
        ]
        means = [
            {name: torch.stack([upload[name] for upload in uploads]).mean(0) for name in state}
            for uploads in itertools.combinations(honest, taken)
        ]
        assert any(all(torch.allclose(new[n], mean[n], atol=1e-5) for n in state) for mean in means)
        state = new
    # The plain mean is far from the mean of the honest replies.
    alone, attacked = (
        train_all(Attacked(one, number=7, method="fedit"), **settings)[0].states[-1]
        for one in (Attacker(), Opposite())
    )
    assert all((alone[n] - attacked[n]).norm() > 0.5 * alone[n].norm() for n in state)


RATE, STEPS = 1.0, 100  # so many that no other check rejects these nodes


class Pointed(Attacker):
    """Put the permitted change into one value of each factor, so that their product is large."""

    reason = "the norm of B would grow by"

    def reply(self, honest, message):
        sent = from_record(message.content["arrays"])
        upload = {name: sent[name] for name in ("B", "A")}
        limit = UpdateNormCheck(None, RATE * STEPS)
        for tensor in upload.values():
            change = measure_changes({"B": tensor}, {"B": tensor})["B"]
            tensor[0] += 0.999 * limit.max_size(change) * math.sqrt(tensor.numel())
        honest.content["arrays"] = to_record(upload)
        return honest


@pytest.mark.parametrize("method", ["flexlora", "raflora", "fedex-lora", "lora-fair"])
def test_a_large_product_of_permitted_factors_is_rejected(method):
    """A correction of LoRA-FAIR cannot become too large by them."""
    settings = {"max_update_norm": "auto", "learning_rate": RATE, "local_steps": STEPS}
    notes, _, _ = train_all(Attacked(Pointed(), method=method), rounds=3, **settings)
    for record in notes.records:
        assert "refused" not in record
        if method != "lora-fair":
            assert [c["partition-id"] for c in record["clients"]] == [0, 1, 3]
            assert re.search(Pointed.reason, record["rejected"][0]["reason"])


def test_a_state_beyond_the_wires_range_is_refused(monkeypatch):
    """Every factor fits into 16 bits and the product does not, so that it could not be sent."""

    def halved(record):
        return decode(from_record(record), "float16")

    class Halved(Attacked):
        def reply(self, message, upload, number):
            return super().reply(message, encode(upload, "float16", torch.Generator()), number)

    class Large(Attacker):
        def reply(self, honest, message):
            upload = from_record(honest.content["arrays"])
            for name in ("B", "A"):
                upload[name][0] = 1000.0
            honest.content["arrays"] = to_record(upload)
            return honest

    monkeypatch.setattr("tests.hand_made.from_record", halved)
    notes, _, _ = train_all(Halved(Large(), method="flexlora"), rounds=2, wire="float16")
    assert [len(record["clients"]) for record in notes.records] == [4, 4]
    assert all("B has numbers up to" in record["refused"] for record in notes.records)


# Envelopes: Flower's own grid on malformed uploads of a node.


def reply_with(content, number=0):
    return as_reply(content, 11, f"question-{number}")


def honest_reply(number=0):
    arrays = to_record({"H": torch.arange(24.0).view(6, 2, 2), "heads": torch.ones(1).byte()})
    return reply_with(RecordDict({"arrays": arrays, "metrics": MetricRecord(METRICS)}), number)


@pytest.fixture(autouse=True)
def identity():
    """A Message takes its run and sender from the identity of the process's task."""
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 0, 0


@pytest.fixture
def uploads():
    install_object_check()
    return Uploads()


@pytest.fixture
def one_thread(monkeypatch):
    """Fetch objects one after the other, since a thread pool for each would be slow."""
    monkeypatch.setattr(
        "flwr.superlink.grid.http_grid.pull_objects",
        lambda object_ids, pull_object_fn: {key: pull_object_fn(key) for key in object_ids},
    )


def test_flowers_grid_loses_replies_fetched_with_a_broken_one(uploads):
    """Replies are fetched one by one for this reason, until Flower handles it."""
    uploads.replies = {
        "question-0": objects_of(honest_reply(0)),
        "question-1": ("x", {"x": b"Message  0\0"}),
    }
    with pytest.raises(Exception):  # noqa: B017, PT011 (any exception)
        uploads.pull_messages(["question-0", "question-1"])
    assert not uploads.replies


def test_other_replies_of_the_same_poll_are_not_lost(uploads):
    for number in range(6):
        uploads.replies[f"question-{number}"] = objects_of(honest_reply(number))
    uploads.replies["question-2"] = ("x", {"x": b"garbage"})
    _, contents = uploads.replies["question-4"]
    array = next(key for key, one in contents.items() if one.startswith(b"Array "))
    uploads.replies["question-4"] = array, contents  # no Message as root
    replies = ReplyFetcher().fetch_ready(uploads, [f"question-{number}" for number in range(8)])
    found = {reply.metadata.reply_to_message_id: reply.has_error() for reply in replies}
    assert found == {f"question-{n}": n in (2, 4) for n in range(6)}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_no_malformed_envelope_stops_the_server(uploads, one_thread):
    random_, honest, sender = random.Random(0), objects_of(honest_reply()), registered_client()
    used = failed = longest = 0
    began = time.process_time()
    for _ in range(ENVELOPES):
        root, contents = mutated(honest, random_)
        uploads.replies, uploads._objects = {"question-0": (root, contents)}, {}
        started = time.process_time()
        reply = fetch(uploads, "question-0")
        assert isinstance(reply, Message)
        assert reply.metadata.reply_to_message_id == "question-0"
        size = sum(map(len, contents.values()))
        assert array_bytes(reply) <= max(MAX_EXPANSION * size, ALWAYS_ROOM)
        try:
            read_trained(reply, sender, 1, FINGERPRINT)
            used += 1
        except ValueError as error:
            longest = max(longest, len(str(error)))
            failed += 1
        assert time.process_time() - started < 10
    assert longest < 2000
    assert failed > ENVELOPES / 2
    assert used > ENVELOPES / 100  # some mutations do no harm
    assert time.process_time() - began < 0.01 * ENVELOPES + 10


def test_a_chunk_listed_a_thousand_times_is_not_assembled(uploads):
    data = bytes(range(256)) * 4096  # 1 MB
    array = Array("uint8", (len(data),), STYPE, data)
    content = RecordDict({"arrays": ArrayRecord({"H": array})})
    root, contents = objects_of(reply_with(content))
    key = next(key for key, one in contents.items() if one.startswith(b"Array "))
    body = json.loads(contents[key].partition(b"\0")[2]) | {"arraychunk_ids": [0] * 1500}
    contents[key] = with_body(contents[key], json.dumps(body).encode())
    uploads.replies["question-0"] = root, contents
    tracemalloc.start()
    try:
        reply = fetch(uploads, "question-0")
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert reply is not None
    assert reply.has_error()
    assert "from few chunks" in str(reply.error.reason)
    assert most < 8 * len(data)


def test_a_large_honest_reply_is_assembled():
    """Zeros are one chunk, listed once for each five megabytes."""
    array = Array("uint8", (60_000_000,), STYPE, bytes(60_000_000))
    message = reply_with(RecordDict({"arrays": ArrayRecord({"H": array})}))
    check_objects(objects_of(message)[1])
    reason = reply_with(Error(2, "x" * 2_000_000))
    with pytest.raises(ValueError, match="2000[0-9]+ bytes beside its tensors"):
        check_objects(objects_of(reason)[1])


def test_an_unreachable_superlink_rejects_no_reply(uploads):
    def refuse(_):
        raise httpx.ConnectError("nobody there")

    uploads._client.PullMessages = uploads._client.GetNodes = refuse
    assert fetch(uploads, "question-0") is None
    assert list(ReplyFetcher().fetch_ready(uploads, ["question-0"])) == []


def test_an_incomplete_reply_does_not_block_the_others(uploads, monkeypatch):
    """A node announces objects and does not upload them, so that their fetch blocks for minutes."""
    monkeypatch.setattr("ravan_flwr.server.waiting.MAX_FETCH_SECONDS", 1.0)
    uploaded = threading.Event()
    fetch = uploads._client.PullObject

    def slow_fetch(request):
        if request.object_id == "never":
            uploaded.wait(30)
        return fetch(request)

    uploads._client.PullObject = slow_fetch
    ids = [f"question-{number}" for number in range(5)]
    for number in (1, 2, 4):
        uploads.replies[ids[number]] = objects_of(honest_reply(number))
    for number in (0, 3):
        uploads.replies[ids[number]] = "never", {"never": b"Message  0\0"}
    inbox, deadline = ReplyFetcher(), RoundDeadline(1.5, 5)
    began = time.monotonic()
    arrived = [r.metadata.reply_to_message_id for r in pull_replies(uploads, inbox, ids, deadline)]
    assert sorted(arrived) == [ids[1], ids[2], ids[4]]
    assert time.monotonic() - began < 4
    uploaded.set()  # they arrive at last, and the next poll returns them
    late: set[str] = set()
    while late != {ids[0], ids[3]}:  # until the test's own timeout
        late |= {reply.metadata.reply_to_message_id for reply in inbox.fetch_ready(uploads, ids)}


def test_replies_that_arrived_in_time_are_read_after_the_timeout(uploads, monkeypatch):
    """Using the first reply takes longer than the timeout; the others had arrived before."""
    ids = [f"question-{number}" for number in range(4)]
    uploads.replies = {key: objects_of(honest_reply(n)) for n, key in enumerate(ids)}
    arrived = []
    for reply in pull_replies(uploads, ReplyFetcher(), ids, RoundDeadline(0.2, 4)):
        arrived.append(reply.metadata.reply_to_message_id)
        if len(arrived) == 1:
            time.sleep(0.5)
    assert arrived == ids


# Text.


def test_text_of_a_node_is_escaped_and_shortened():
    assert plain("a\x1b[2K\nb\u202e\\") == "a\\x1b[2K\\nb\\u202e\\"
    assert plain("ok: größer") == "ok: größer"
    for text in ("x" * 10**6, "\x00" * 10**6, "\ud800" * 499):
        assert len(plain(text)) <= 500
        assert plain(text).isprintable()
        assert plain(plain(text)) == plain(text)
    assert len(shown([[1.0] * 10**6] * 10)) <= 500
    assert shown(7) == "7"
