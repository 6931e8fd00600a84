"""Fake nodes for tests of the server: honest, faulty or unresponsive, without model or data."""

import time
import uuid
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from ravan_flwr.config.keys import LIMITS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.launch.in_process_grid import InProcessGrid
from ravan_flwr.messages.arrays import from_record, to_record
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.server import client_registry as recruiting
from ravan_flwr.server import waiting
from ravan_flwr.server.resume import ResumePoint
from ravan_flwr.server.strategy import FederatedTuning
from ravan_flwr.tasks.base import Measures
from tests.methods import build, train_client

FINGERPRINT = [1.0, 2.0]
# What an honest client says of the first round.
METRICS: dict[str, Any] = {
    "round": 1, "train-loss": 1.0, "seconds": 0.1, "fingerprint": FINGERPRINT,
}  # fmt: skip


# A round's record and that of one of its clients, with every key that all runs write.
CLIENT = {
    "partition-id": 0, "budget-fraction": 1.0, "heads": 4.0, "selected": [[0]], "examples": 10,
    "steps": 1, "bytes-up": 1, "bytes-down": 1,
}  # fmt: skip
ROUND = {
    "round": 1, "train-loss": 1.0, "metrics": {"accuracy": 0.5}, "clients": [], "rejected": [],
    "not-eligible": [], "skipped": [], "unused": [], "partitions": 4, "bytes-up": 1,
    "bytes-down": 1, "seconds": 0.1, "phases": {},
}  # fmt: skip
# The summary of a run, likewise.
SUMMARY = {
    "method": "ravan", "preset": "digits-vit", "seed": 0, "classifier": "trained",
    "num-clients": 4, "rounds": 3, "rank": 4, "learning-rate": 0.1, "trainable-parameters": 7,
    "adapter-parameters": 7, "metric": "accuracy",
    "metrics": {"final": {"accuracy": 0.5}, "best": {"accuracy": 0.5}}, "bytes-up": 1,
    "bytes-down": 1, "rejected": 0, "collapsed": [], "without-effect": [], "not-eligible": [],
    "seconds": 1.0, "finished": "2026-01-01T12:00:00+00:00",
}  # fmt: skip


def registered_client(node_id=1, partition_id=0, **changes):
    settings: dict[str, Any] = {
        "num_partitions": 4, "own_data": False, "examples": 10, "budget_fraction": 1.0,
        "device": "cpu", "free_memory": 0, "versions": "",
        "code": code_fingerprint(), "backbone": "b", "fingerprint": tuple(FINGERPRINT),
    }  # fmt: skip
    return RegisteredClient(node_id=node_id, partition_id=partition_id, **settings | changes)


class Nodes(InProcessGrid):
    """Nodes 11, 12, ... with partitions in reverse order; `behave` may replace a node's reply."""

    def __init__(self, number=4, behave=None, method="ravan", **changes):
        super().__init__({}, 1)
        self.method, self.adapters = build(method)
        self.registered = {
            11 + i: registered_client(11 + i, number - 1 - i, num_partitions=number, **changes)
            for i in range(number)
        }
        self.behave = behave or (lambda *_: None)
        self.trained: list[tuple[int, int]] = []

    def get_node_ids(self):
        return list(self.registered)

    def _deliver(self, message):
        node = self.registered[message.metadata.dst_node_id]
        reply = self.behave(node.partition_id, message) or self.answer(node, message)
        reply.metadata.__dict__["_message_id"] = str(uuid.uuid4())
        return reply

    def answer(self, node, message):
        if message.metadata.message_type == "query":
            return Message(RecordDict({"client": ConfigRecord(node.as_config())}), reply_to=message)
        number = message.content["config"]["round"]
        if message.metadata.message_type == "evaluate":
            values = {"round": number, "num-examples": 1 + node.partition_id}
            values |= {"accuracy": node.partition_id / 4, "loss": 1.0}
            return Message(RecordDict({"metrics": MetricRecord(values)}), reply_to=message)
        self.trained.append((number, node.partition_id))
        state = from_record(message.content["arrays"])
        if message.metadata.message_type == "train.calibrate":
            upload = self.method.calibration.run(self.adapters, Shifts(1 + node.partition_id))
            return self.reply(message, upload, number)
        method = self.method.in_round(number)
        upload = train_client(method, self.adapters, state, node.budget_fraction, node.partition_id)
        return self.reply(message, upload, number)

    def reply(self, message, upload, number):
        values = METRICS | {"round": number}
        if self.method.personal is not None and number:  # no calibration
            values["began-anew"] = 0
        records: dict[str, Any] = {"arrays": to_record(upload), "metrics": MetricRecord(values)}
        return Message(RecordDict(records), reply_to=message)


def as_reply(content, node_id=1, question=None):
    """Return a reply with that content, or error, to a message with that id."""
    message = Message(RecordDict(), node_id, "train")
    message.metadata.__dict__["_message_id"] = question or str(uuid.uuid4())
    return Message(content, reply_to=message)


class Shifts:
    """Local steps that add a number to every weight."""

    def __init__(self, by):
        self.by = by

    def train(self, parameters):
        with torch.no_grad():
            for parameter in parameters:
                parameter.add_(self.by)


class Notes:
    def __init__(self):
        self.records: list[dict[str, Any]] = []
        self.states: list[Tensors] = []
        self.memory: Tensors = {}

    def on_round_end(self, record, state):
        self.records.append(record)
        if record["round"]:
            self.states.append(state)
        else:
            self.calibrated_state = dict(state)


def settings_from(named):
    """Return a run config of settings with Python names; limits are joined in one key."""
    found = {name.replace("_", "-"): value for name, value in named.items()}
    limits = {name: found.pop(name) for name in LIMITS if name in found}
    if given := {name: limit for name, limit in limits.items() if limit != "auto"}:
        found["limits"] = ",".join(f"{name}={limit}" for name, limit in given.items())
    return found


def loaded_of(method=None, partition_sizes=None):
    """Return a fake of the server's model and data, with the nodes' fingerprints."""
    model = SimpleNamespace(
        method=method,
        seed_fingerprint=FINGERPRINT,
        fingerprint=FINGERPRINT,
        load_fixed=lambda _: FINGERPRINT,
    )
    task = SimpleNamespace(measures=Measures(), metric="accuracy")
    return SimpleNamespace(
        model=model, task=task, backbone_fingerprint="b", partition_sizes=partition_sizes
    )


def strategy_of(nodes, config, partition_sizes=None, memory=None, **given):
    """Make the strategy of a run over these nodes, from the method's initial state."""
    start = ResumePoint(nodes.method.initial_state(nodes.adapters), memory=memory or {})
    return FederatedTuning(config, loaded_of(nodes.method, partition_sizes), start, **given)


def run(nodes, rounds=2, evaluate_fn=None, timeout=5.0, owners=None, **settings):
    notes = Notes()
    # Updates of these nodes are larger than a few steps of Adam could make them.
    settings = {"max_update_norm": 1e6} | settings
    settings |= {"num_rounds": rounds, "round_timeout": timeout}
    config = read_config(settings_from(settings))
    strategy = strategy_of(nodes, config, callbacks=[notes])
    strategy.federation.registry.owners.update(owners or {})
    strategy.start(
        nodes, initial(nodes), num_rounds=rounds, timeout=timeout, evaluate_fn=evaluate_fn
    )
    return notes, strategy, strategy.federation.state.tensors


def initial(nodes):
    return to_record(nodes.method.initial_state(nodes.adapters))


@pytest.fixture(autouse=True)
def fake_clock(monkeypatch):
    """Replace the clock: time passes only while the server sleeps.

    So the server waits for an unresponsive node without real time, and an honest node answers at
    once, however busy the machine is. `MAX_FETCH_SECONDS` is real time, for which threads wait.
    """
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", sleep)
    for name in ("NODES_TIMEOUT", "REGISTRY_TIMEOUT", "QUERY_TIMEOUT"):
        monkeypatch.setattr(recruiting, name, 0.2)
    monkeypatch.setattr(waiting, "MAX_FETCH_SECONDS", 60.0)


class Unresponsive(Nodes):
    """Some partitions never answer a training message."""

    def __init__(self, *partitions):
        super().__init__()
        self.unresponsive = partitions

    def pull_messages(self, message_ids):
        return [r for r in super().pull_messages(message_ids) if not self.is_unresponsive(r)]

    def is_unresponsive(self, reply):
        node = self.registered[reply.metadata.src_node_id]
        return reply.metadata.message_type == "train" and node.partition_id in self.unresponsive
