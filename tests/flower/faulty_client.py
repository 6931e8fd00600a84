"""Make a client process faulty: errors, delays, wrong values, hostile objects.

Each process that Flower starts for a message runs `INSTALL` at its start (at_start.py).
tests/attackers.py has many more faults.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.proto.message_pb2 import Message as ProtoMessage

from tests.attackers import with_body

INSTALL = "from tests.flower import faulty_client; faulty_client.install({folder!r}, {plan!r})"

Plan = dict[int, dict[int, dict[int, str]]]  # partition -> seed of a run -> round -> fault


def install(folder: str, plan: Plan) -> None:
    """Replace this process's functions for replies and uploads."""
    answer, deflate_message, deflate_array = ClientApp.__call__, Message.deflate, Array.deflate
    fault = ""

    def answer_wrongly(self: ClientApp, message: Message, context: Context) -> Message:
        nonlocal fault
        reply = answer(self, message, context)
        if message.metadata.message_type == "train":
            number = int(str(message.content.config_records["config"]["round"]))
            by_seed = plan.get(int(str(context.node_config["partition-id"])), {})
            fault = by_seed.get(int(str(context.run_config["seed"])), {}).get(number, "")
            _change(reply, fault, Path(folder))
        return reply

    ClientApp.__call__ = answer_wrongly  # type: ignore[method-assign]
    Message.deflate = lambda self: _message(deflate_message(self), fault)  # type: ignore[method-assign]
    Array.deflate = lambda self: _array(deflate_array(self), fault)  # type: ignore[method-assign]


# Faulty replies in well-formed objects.


def _change(reply: Message, fault: str, folder: Path) -> None:
    match fault:
        case "raises":
            raise ZeroDivisionError("on fire")
        case "escape":
            raise ValueError("\x1b[2K\rround 9/9  loss 0.0000\n")
        case "silent":
            _wait_until(folder / "closed")
            _write_pid(folder / "silent")
        case "after silence":
            _write_pid(folder / "spoke")
            _wait_for_the_end_of(folder / "silent")
        case "after the other":
            _wait_for_the_end_of(folder / "spoke")
        case "nan":
            sent = dict(reply.content.array_records["arrays"].items())
            values = np.frombuffer(sent["H"].data, "float32").copy()
            values[0] = np.nan
            changed = Array("float32", sent["H"].shape, sent["H"].stype, values.tobytes())
            reply.content["arrays"] = ArrayRecord(sent | {"H": changed})


def _wait_until(path: Path) -> None:
    while not path.exists():
        time.sleep(0.1)


def _write_pid(path: Path) -> None:
    """Write this process's id, atomically."""
    path.with_suffix(".new").write_text(str(os.getpid()))
    path.with_suffix(".new").rename(path)


def _wait_for_the_end_of(path: Path) -> None:
    """Return when the process whose id is in the file has ended: it has uploaded its reply."""
    _wait_until(path)
    pid = int(path.read_text())
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.1)


# Hostile objects, which Flower's own code cannot make.


def _message(content: bytes, fault: str) -> bytes:
    if fault == "question":
        proto = ProtoMessage.FromString(content.partition(b"\0")[2])
        proto.metadata.reply_to_message_id = "of my own making"
        return with_body(content, proto.SerializeToString())
    return b"Message  0\0" if fault == "short" else content


def _array(content: bytes, fault: str) -> bytes:
    if fault != "chunks":
        return content
    body: Any = json.loads(content.partition(b"\0")[2]) | {"arraychunk_ids": [0] * 60_000}
    return with_body(content, json.dumps(body).encode())
