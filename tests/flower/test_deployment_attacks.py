"""Hostile objects over TLS: what a registered node's client uploads in place of its reply.

Node 1 is hostile in every round in another way. The run goes on with node 0, to its end.
"""

import os
import re
from pathlib import Path

import pytest

from testing.deployment import Deployment
from tests import ROOT

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="finds processes in /proc"),
    pytest.mark.timeout(600),
]

# What node 1 uploads in each round, and what the record says about it.
ATTACKS = {
    1: ("question", "its reply cannot be read: ValueError: it answers message 'of my own making'"),
    2: ("dtype", "its reply cannot be read: TypeError: Invalid arguments for Array"),
    3: ("sides", "has a shape of 10000 sides, expected 8 at most"),
    4: ("chunks", "its reply cannot be read: ValueError: its tensors are .* bytes from few chunks"),
    5: ("root", "its reply cannot be read: AttributeError: 'RecordDict' object"),
    6: ("short", "its reply cannot be read: IndexError"),
    7: ("escape", r"x1b\[2K.*round 9/9"),
    8: ("loss", r"train-loss is 1.7e\+308, expected"),
}

# Python runs a `sitecustomize` on its path at every start; this one changes what is uploaded.
HOSTILE = """
import sys
if any("flwr-clientapp" in word for word in sys.orig_argv):
    import json
    from flwr.app import Array, Message
    from flwr.clientapp import ClientApp
    from flwr.proto.message_pb2 import Message as ProtoMessage

    ATTACKS = {attacks!r}
    attack = None
    answer, of_message, of_array = ClientApp.__call__, Message.deflate, Array.deflate

    def with_body(content, body):
        kind, children, _ = content.partition(bytes(1))[0].split(b" ")
        return b" ".join([kind, children, str(len(body)).encode()]) + bytes(1) + body

    def message(self):
        content = of_message(self)
        if attack == "question":
            proto = ProtoMessage.FromString(content.partition(bytes(1))[2])
            proto.metadata.reply_to_message_id = "of my own making"
            return with_body(content, proto.SerializeToString())
        if attack == "root":
            return self.content.deflate()
        if attack == "short":
            return b"Message  0" + bytes(1)
        return content

    def array(self):
        content = of_array(self)
        changed = {{
            "dtype": {{"dtype": ["float32"]}},
            "sides": {{"shape": [1 << 40] * 10_000}},
            "chunks": {{"arraychunk_ids": [0] * 60_000}},
        }}.get(attack)
        if changed is None:
            return content
        body = json.loads(content.partition(bytes(1))[2]) | changed
        return with_body(content, json.dumps(body).encode())

    def hostile(self, message, context):
        global attack
        reply = answer(self, message, context)
        if message.metadata.message_type == "train":
            attack = ATTACKS.get(message.content.config_records["config"]["round"])
        if attack == "escape":
            raise ValueError("\\x1b[2K\\rround 9/9  loss 0.0000\\n")
        if attack == "loss":
            reply.content["metrics"]["train-loss"] = 1.7e308
        return reply

    ClientApp.__call__, Message.deflate, Array.deflate = hostile, message, array
"""


def test_hostile_objects_cost_their_round_and_nothing_else(tmp_path):
    with Deployment(tmp_path, nodes=2) as deployment:
        hostile = deployment.folder / "hostile"
        hostile.mkdir()
        kinds = {number: kind for number, (kind, _) in ATTACKS.items()}
        (hostile / "sitecustomize.py").write_text(HOSTILE.format(attacks=kinds))
        for number in range(2):
            deployment.register(number)
            paths = [str(hostile), str(ROOT)] if number else [str(ROOT)]
            deployment.start_node(
                number,
                f"partition-id={number} num-partitions=2 warm-worker=true",
                PYTHONPATH=os.pathsep.join(paths),
            )
        assert [deployment.wait_for_node(number) for number in range(2)] == [True, True]
        run = deployment.run(
            f"num-rounds={len(ATTACKS) + 1} clients-per-round=2 local-steps=2 round-timeout=60.0 "
            "report=false tracking='none'"
        )
        assert run.wait() == "finished:completed"
        records = {record["round"]: record for record in run.rounds}
        for number, (_, reason) in ATTACKS.items():
            assert [c["partition-id"] for c in records[number]["clients"]] == [0], number
            (rejected,) = records[number]["rejected"]
            assert rejected["client"] == "partition 1"
            assert re.search(reason, rejected["reason"]), (number, rejected["reason"])
            assert len(rejected["reason"]) <= 500
        assert [c["partition-id"] for c in records[len(ATTACKS) + 1]["clients"]] == [0, 1]
        assert "\x1b[2K" not in run.log
        assert not re.search(r"^.?round 9/9  loss 0.0000", run.log, re.MULTILINE)
    assert deployment.left_running == []
