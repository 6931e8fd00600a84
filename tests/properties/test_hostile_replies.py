"""Ten thousand replies of hostile nodes: none affects a sum, and none stops a run."""

import copy
import functools
import tracemalloc
import uuid
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from ravan_flwr.config.run_config import read_config
from ravan_flwr.messages.arrays import STYPE, from_record, to_record
from ravan_flwr.methods import METHODS
from ravan_flwr.seeding import generator
from ravan_flwr.server.aggregation import make_broadcast
from ravan_flwr.server.update import read_trained
from tests.hand_made import FINGERPRINT, METRICS, Nodes, as_reply, registered_client, strategy_of
from tests.methods import build, calibration_sums
from tests.short_runs import same_bits

NAMES = ["H", "heads", "B", "A", "weights", "classifier", "residual", "", "x"]
NUMBERS = st.one_of(
    st.integers(-(2**62), 2**62), st.floats(allow_nan=True, allow_infinity=True), st.just(1)
)
VALUES = st.one_of(
    NUMBERS,
    st.lists(st.integers(-3, 3), max_size=4),
    st.lists(st.floats(width=32), max_size=4),
    st.just(FINGERPRINT),
)


@st.composite
def arrays(draw):
    """Draw bytes with a dtype and a shape that may be wrong."""
    dtype = draw(
        st.sampled_from(["float32", "float16", "bfloat16", "uint8", "int32", "float64", "O", ""])
    )
    shape = draw(
        st.one_of(
            st.sampled_from([(6, 2, 2), (2, 3, 2, 2), (1,), (22,), (24,), (2, 2, 2), (0,)]),
            st.lists(st.integers(-2, 2**40), max_size=5).map(tuple),
        )
    )
    kind = draw(st.sampled_from(["zeros", "garbage", "nan", "huge", "short"]))
    sides = [side for side in shape if 0 <= side < 100]
    count = int(np.prod(sides, dtype=np.int64)) if len(sides) == len(shape) else 3
    width = {"float64": 8, "float16": 2, "bfloat16": 2, "uint8": 1}.get(dtype, 4)
    size = min(count, 10_000) * width
    data = {
        "zeros": bytes(size),
        "nan": b"\xff" * size,
        "huge": b"\x7e" * size,
        "short": bytes(max(0, size - 1)),
        "garbage": draw(st.binary(max_size=64)),
    }[kind]
    stype = draw(st.sampled_from([STYPE, STYPE, STYPE, "numpy.ndarray", ""]))
    return Array(dtype=dtype, shape=shape, stype=stype, data=data)


@st.composite
def contents(draw):
    """Draw any records, some with the right names."""
    content = RecordDict()
    if draw(st.booleans()):
        content["arrays"] = ArrayRecord(
            draw(st.dictionaries(st.sampled_from(NAMES), arrays(), max_size=3))
        )
    keys = st.sampled_from(
        ["round", "train-loss", "seconds", "fingerprint", "num-examples", "loss"]
    )
    metrics = draw(st.dictionaries(keys, VALUES, max_size=6))
    if draw(st.booleans()):
        metrics |= METRICS
    kind = draw(st.sampled_from(["metrics", "metrics", "metrics", "other", "config"]))
    if kind == "config":
        content["metrics"] = ConfigRecord({"round": 1, "train-loss": "x", "fingerprint": b"x"})
    else:
        content[kind] = MetricRecord(metrics)
    if draw(st.booleans()):
        content[draw(st.sampled_from(["arrays", "metrics", "junk"]))] = draw(
            st.sampled_from([MetricRecord(), ConfigRecord(), ArrayRecord()])
        )
    return content


@st.composite
def changed(draw):
    """Draw one change of an honest reply; nearly valid replies are harder to refuse."""
    part = draw(st.sampled_from(["dtype", "shape", "bytes", "value", "name", "metric", "drop"]))
    return part, draw(st.integers(0, 2**16)), draw(VALUES)


def spoil(reply, part, number, value):
    """Apply the change to the honest reply."""
    content = reply.content
    if part == "metric":
        wrong: dict[str, Any] = {
            "round": 2,
            "train-loss": float("inf"),
            "seconds": [1.0],
            "fingerprint": [0.0],
        }
        if "began-anew" in content["metrics"]:
            wrong["began-anew"] = 2
        key = sorted(wrong)[number % len(wrong)]
        content["metrics"] = MetricRecord({**content["metrics"], key: wrong[key]})
        return reply
    packed = content["arrays"]
    if not packed:  # no tensors are sent, so that any is wrong
        content["arrays"] = to_record({"x": torch.full((2,), 0.5)})
        return reply
    name = sorted(packed)[number % len(packed)]
    array, tensors = packed[name], from_record(packed)
    if part == "drop":
        del tensors[name]
    elif part == "name":
        tensors[f"{name}x"] = tensors.pop(name)
    elif part == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    elif part == "shape":
        tensors[name] = tensors[name].flatten()[None]
    elif part == "value" and tensors[name].is_floating_point():
        flat = tensors[name].flatten()
        flat[number % len(flat)] = [float("nan"), float("inf"), -float("inf"), 1e38][number % 4]
    else:
        spoiled = Array(array.dtype, array.shape, array.stype, array.data[:-1])
        content["arrays"] = ArrayRecord({**packed, name: spoiled})
        return reply
    content["arrays"] = to_record(tensors)
    return reply


class Server:
    """A strategy in its first round, with one honest client and one other."""

    def __init__(self, method):
        self.nodes = Nodes(2, method=method)
        config = read_config({"method": method, "limits": "max-update-norm=1e4"})
        self.strategy = strategy_of(self.nodes, config)
        self.strategy.federation.registry.recruit(self.nodes)
        self.state = self.nodes.method.initial_state(self.nodes.adapters)
        # Sent to each client in each round.
        self.sent = to_record(make_broadcast(self.nodes.method, self.state, 1.0))
        self.round = None
        first, *_ = self.nodes.registered.values()
        # The honest client's reply is made once.
        self.honest = self.nodes.answer(first, self.message(first)).content

    def message(self, node, number=1):
        message = self.strategy.federation.message_builder.message(
            node, "train", number, self.sent, {}
        )
        message.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        if self.round is not None:
            self.round.expect(message, node)
        return message

    def reply(self, node, what):
        message = self.message(node)
        if what is None:
            return Message(Error(2), reply_to=message)
        if isinstance(what, RecordDict):
            return Message(what, reply_to=message)
        honest = Message(RecordDict(dict(self.honest)), reply_to=message)
        return spoil(honest, *what) if what else honest

    def close(self, *what):
        """Return the state after a round of these replies, and the round log."""
        self.strategy.federation.state.tensors = self.state
        self.strategy.open_round(1, self.nodes)
        self.round = self.strategy.round
        clients = self.nodes.registered.values()
        replies = [self.reply(node, one) for node, one in zip(clients, what, strict=False)]
        self.strategy.aggregate_train(1, replies)
        return self.strategy.federation.state.tensors, self.round.log


BATCH = 25
REPLIES = st.lists(st.one_of(contents(), changed(), st.none()), min_size=BATCH, max_size=BATCH)


@functools.cache
def drawn_replies():
    """Draw the hostile replies once for all methods, since drawing is slower than refusing."""
    drawn: list[Any] = []

    @settings(
        max_examples=10_000 // (BATCH * len(METHODS)) + 1,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(REPLIES)
    def collect(replies):
        drawn.extend(replies)

    collect()
    return drawn


@pytest.mark.slow(kept=3)
@pytest.mark.parametrize("method", METHODS)
def test_no_hostile_reply_affects_a_sum(method):
    server = Server(method)
    alone, _ = server.close(())
    replies = copy.deepcopy(drawn_replies())
    assert len(replies) * len(METHODS) >= 10_000
    for what in replies:
        state, round_log = server.close((), what)
        # Without adapters, a reply without tensors may be as valid as the honest one.
        bare = isinstance(what, RecordDict) and not what.array_records.get("arrays")
        accepted = 2 if method == "none" and bare and not round_log.rejected else 1
        assert len(round_log.clients) == accepted == 2 - len(round_log.rejected), what
        assert state.keys() == alone.keys()
        assert all(torch.equal(state[name], alone[name]) for name in alone), what


@pytest.mark.parametrize("method", METHODS)
def test_an_honest_reply_is_used(method):
    """The test above would also pass if every reply were refused."""
    server = Server(method)
    _, round_log = server.close((), ())
    assert len(round_log.clients) == 2
    assert not round_log.rejected


INITS = ("data-aware", "first-round")
CALIBRATED = [*(("ravan", {"init": init}) for init in INITS), ("fed-sb", {}), ("slora", {})]


@pytest.mark.parametrize(("method", "changes"), CALIBRATED)
def test_a_nearly_valid_calibration_upload_is_refused_and_changes_no_sum(method, changes):
    built, _ = build(method, **changes)
    numbers = torch.randn(built.calibration.bytes_up // 4, generator=generator(0))
    name = "sketch" if "data-aware" in changes.values() else "change"
    sums, plain = calibration_sums(built), calibration_sums(built)
    for bad, message in (
        ({}, "got tensors .*expected"),
        ({"B": numbers}, "got tensors .*expected"),
        ({name: numbers[:-1]}, f"{name} is .*expected"),
        ({name: numbers * torch.nan}, "not finite"),
    ):
        with pytest.raises(ValueError, match=message):
            sums.check_and_add(bad, 1.0)
    for each in (sums, plain):
        each.add({name: numbers}, 1.0)
    assert all(same_bits(*pair) for pair in zip(sums.close(), plain.close(), strict=True))


@pytest.mark.slow(kept=1)
@pytest.mark.parametrize(("method", "changes"), CALIBRATED)
@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(REPLIES)
def test_no_hostile_reply_affects_the_calibration(method, changes, replies):
    method_, _ = build(method, **changes)
    sums = calibration_sums(method_)
    node = registered_client()
    for what in replies:
        if not isinstance(what, RecordDict):
            continue
        reply = as_reply(what, node.node_id)
        with pytest.raises(ValueError):  # noqa: PT011 (any that has a reason)
            sums.check_and_add(read_trained(reply, node, 1, FINGERPRINT).upload, 1.0)


def test_the_memory_of_large_replies_is_released():
    """Twenty replies of 4 MB each are released."""
    arrays = to_record({"H": torch.zeros(1_000_000)})
    content = RecordDict({"arrays": arrays, "metrics": MetricRecord(METRICS)})
    server = Server("ravan")
    server.close((), content)
    tracemalloc.start()
    try:
        for _ in range(20):
            server.close((), content)
        now, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert now < 1e6
    assert most < 20e6
