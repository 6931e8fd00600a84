"""Make a client process faulty: errors, delays, wrong values, hostile objects.

Python runs a `sitecustomize` on its path at every start. A node with `write`'s folder in
PYTHONPATH runs this module first in each process that Flower starts for a message.
"""

import json
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.proto.message_pb2 import Message as ProtoMessage

_CUSTOMIZE = """
import sys
if any("flwr-clientapp" in word for word in sys.orig_argv):
    from tests.flower import faulty_client
    faulty_client.install({folder!r}, {plan!r})
"""


Plan = dict[int, dict[int, dict[int, str]]]  # partition -> seed of a run -> round -> fault


def write(folder: Path, plan: Plan) -> None:
    """Write a folder whose `sitecustomize` installs this plan of faults."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_CUSTOMIZE.format(folder=str(folder), plan=plan))


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
    Message.deflate = lambda self: _message(self, deflate_message(self), fault)  # type: ignore[method-assign]
    Array.deflate = lambda self: _array(deflate_array(self), fault)  # type: ignore[method-assign]


# Faulty replies in well-formed objects.


def _change(reply: Message, fault: str, folder: Path) -> None:
    metrics: Any = reply.content.get("metrics")
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
        case "round":
            metrics["round"] = 99
        case "loss":
            metrics["train-loss"] = 1.7e308
        case "nothing":
            reply.content = RecordDict()
        case _ if fault in _OF_HEADS:
            _change_heads(reply, fault)


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


_OF_HEADS = ("nan", "infinity", "shape", "dtype", "index", "heads", "norm", "bytes")


def _change_heads(reply: Message, fault: str) -> None:
    sent = dict(reply.content.array_records["arrays"].items())
    h = np.frombuffer(sent["H"].data, "float32").reshape(sent["H"].shape).copy()
    index = np.frombuffer(sent["heads"].data, "uint8").copy()
    match fault:
        case "nan":
            h[0, 0, 0] = np.nan
        case "infinity":
            h[-1] = np.inf
        case "shape":
            h = np.ascontiguousarray(h[:, :, :-1])
        case "dtype":
            h = h.astype("float64")
        case "index":
            index[0] &= 0b11111110 if index[0] & 1 else 0b11111101 if index[0] & 2 else 0b11111011
        case "heads":
            h, index[:] = np.concatenate([h, h]), 255
        case "norm":
            h = h * np.float32(1e6)
    data = h.tobytes()[: -1 if fault == "bytes" else None]
    stype = sent["H"].stype
    changed = {
        "H": Array(str(h.dtype), h.shape, stype, data),
        "heads": Array("uint8", index.shape, stype, index.tobytes()),
    }
    reply.content["arrays"] = ArrayRecord(sent | changed)


# Hostile objects, which Flower's own code cannot make.


def _message(message: Message, content: bytes, fault: str) -> bytes:
    match fault:
        case "question":
            proto = ProtoMessage.FromString(content.partition(b"\0")[2])
            proto.metadata.reply_to_message_id = "of my own making"
            return _with_body(content, proto.SerializeToString())
        case "root":
            return message.content.deflate()
        case "short":
            return b"Message  0\0"
    return content


_ARRAYS: dict[str, dict[str, Any]] = {
    "array-dtype": {"dtype": ["float32"]},
    "sides": {"shape": [1 << 40] * 10_000},
    "chunks": {"arraychunk_ids": [0] * 60_000},
}


def _array(content: bytes, fault: str) -> bytes:
    if fault not in _ARRAYS:
        return content
    body = json.loads(content.partition(b"\0")[2]) | _ARRAYS[fault]
    return _with_body(content, json.dumps(body).encode())


def _with_body(content: bytes, body: bytes) -> bytes:
    kind, children, _ = content.partition(b"\0")[0].split(b" ")
    return b" ".join([kind, children, str(len(body)).encode()]) + b"\0" + body
