"""Malicious nodes, one class a behaviour, and a SuperLink that forwards their uploads unchecked.

An `Attacker` changes the honest replies of one node of `Attacked`.
`Uploads` is Flower's `HttpGrid` over a fake SuperLink, which returns the objects that a test sets.
"""

import json
import random
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.message_pb2 import Metadata, ObjectTree, PullObjectResponse
from flwr.proto.runtime_pb2 import GetNodesResponse, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.superlink.grid.http_grid import HttpGrid

from ravan_flwr.messages.arrays import STYPE, from_record, to_record
from tests.hand_made import Nodes


class Attacker:
    """Changes its honest reply to a message of one kind.

    `reason` is a pattern for the reason of the rejection in the round's record.
    """

    kind: ClassVar[str] = "train"
    reason: ClassVar[str] = ""

    def replies(self, honest: Message, message: Message) -> list[Any]:
        """Return all replies to the message; may raise, as Flower does for broken objects."""
        return [self.reply(honest, message)]

    def reply(self, honest: Message, message: Message) -> Any:
        """Return the changed reply."""
        return honest


class UnknownQuestion(Attacker):
    reason = "its reply cannot be read: .*answers message"

    def reply(self, honest, message):
        honest.metadata.__dict__["_reply_to_message_id"] = "of my own making"
        return honest


class Doubled(Attacker):
    """Send two replies: the server uses the first, once."""

    def replies(self, honest, message):
        return [honest, honest]


class NoMessage(Attacker):
    reason = "cannot be read: TypeError: it is a RecordDict, expected a Message"

    def reply(self, honest, message):
        return honest.content


class Garbage(Attacker):
    reason = "cannot be read: UnicodeDecodeError: 'utf-8' codec"

    def reply(self, honest, message):
        return b"\xff".decode()


class Nested(Attacker):
    reason = "cannot be read: RecursionError"

    def reply(self, honest, message):
        return json.loads("[" * 100_000)


class DtypeIsList(Attacker):
    reason = "dtype, shape, stype or data is of no use"

    def reply(self, honest, message):
        next(iter(honest.content["arrays"].values())).dtype = ["float32"]
        return honest


class ManySides(Attacker):
    reason = "has 200000 dimensions, expected 8 at most"

    def reply(self, honest, message):
        sides = (2**40,) * 200_000
        honest.content["arrays"] = ArrayRecord({"H": Array("float32", sides, STYPE, b"")})
        return honest


class ForgesALine(Attacker):
    reason = r"failed with code 2: \\x1b\[2K\\rround 2/2  loss 0.0000\\ninfo: done"

    def reply(self, honest, message):
        return Message(Error(2, "\x1b[2K\rround 2/2  loss 0.0000\ninfo: done"), reply_to=message)


class LongReason(Attacker):
    reason = r"failed with code 2: x{400}"

    def reply(self, honest, message):
        return Message(Error(2, "x" * 20_000_000), reply_to=message)


class LongName(Attacker):
    reason = "got tensors"

    def reply(self, honest, message):
        tensors = from_record(honest.content["arrays"])
        honest.content["arrays"] = to_record({"\x1b" * 1_000_000: torch.zeros(1), **tensors})
        return honest


class Empty(Attacker):
    reason = "missing 'metrics'"

    def reply(self, honest, message):
        return Message(RecordDict(), reply_to=message)


class OtherRecords(Attacker):
    reason = "missing 'metrics'"

    def reply(self, honest, message):
        content = RecordDict({"metrics": ConfigRecord({"round": 1}), "arrays": MetricRecord()})
        return Message(content, reply_to=message)


class WrongMetric(Attacker):
    key: str
    value: Any

    def reply(self, honest, message):
        honest.content["metrics"][self.key] = self.value
        return honest


class HugeLoss(WrongMetric):
    key, value, reason = "train-loss", 1.7e308, r"train-loss is 1.7e\+308, expected from -1e\+09 to"


class HugeEvaluationLoss(WrongMetric):
    kind, key, value, reason = "evaluate", "loss", 1.7e308, r"loss is 1.7e\+308, expected"


class Accuracy123(WrongMetric):
    kind, key, value = "evaluate", "accuracy", 123.0
    reason = "accuracy is 123, expected from 0 to 1"


class LongFingerprint(WrongMetric):
    key, value = "fingerprint", [1.0] * 1_000_000
    reason = r"fingerprint \[1.0, 1.0, .*expected \[1.0, 2"


class RoundIsList(WrongMetric):
    key, value, reason = "round", [1] * 100_000, r"reply is of round \[1, 1, 1"


ATTACKERS = [*Attacker.__subclasses__(), *WrongMetric.__subclasses__()]
ATTACKERS.remove(WrongMetric)


class Attacked(Nodes):
    """Nodes of which the one with partition 2 is the attacker."""

    def __init__(self, attacker: Attacker, **named):
        super().__init__(**named)
        self.attacker = attacker

    def pull_messages(self, message_ids):
        (message_id,) = message_ids
        message = self._waiting.get(message_id)
        replies = list(super().pull_messages(message_ids))
        if message is None or not replies:
            return replies
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        if kind != self.attacker.kind or self.registered[node].partition_id != 2:
            return replies
        return self.attacker.replies(replies[0], message)


class Uploads(HttpGrid):
    """Flower's grid over a fake SuperLink that answers the calls for replies."""

    def __init__(self) -> None:
        super().__init__(token="any")
        self.set_run(Run.create_empty(1))
        self.replies: dict[str, tuple[str, Mapping[str, bytes]]] = {}  # message id -> root, objects
        self._objects: dict[str, bytes] = {}
        handlers: dict[str, Any] = {"PullMessages": self._pull, "PullObject": self._object}
        handlers |= {"ConfirmMessageReceived": lambda _: None, "GetNodes": self._nodes}
        self._client = SimpleNamespace(**handlers)  # type: ignore[assignment]

    def _nodes(self, _: Any) -> GetNodesResponse:
        return GetNodesResponse()

    def _pull(self, request: Any) -> PullAppMessagesResponse:
        found = [
            (key, *self.replies.pop(key)) for key in request.message_ids if key in self.replies
        ]
        for _, _, objects in found:
            self._objects.update(objects)
        return PullAppMessagesResponse(
            messages_list=[
                ProtoMessage(metadata=Metadata(message_id=root, reply_to_message_id=key))
                for key, root, _ in found
            ],
            message_object_trees=[
                ObjectTree(object_id=root, children=[ObjectTree(object_id=key) for key in objects])
                for _, root, objects in found
            ],
        )

    def _object(self, request: Any) -> PullObjectResponse:
        content = self._objects.get(request.object_id)
        return PullObjectResponse(
            object_found=content is not None, object_available=True, object_content=content or b""
        )


def objects_of(message: Message) -> tuple[str, dict[str, bytes]]:
    """Return what a client uploads for a message: the root's id, and every object's bytes."""
    objects = get_all_nested_objects(message)
    return message.object_id, {key: obj.deflate() for key, obj in objects.items()}


def with_body(content: bytes, body: bytes) -> bytes:
    """Return the object with another body."""
    kind, children, _ = content.partition(b"\0")[0].split(b" ")
    return b" ".join([kind, children, str(len(body)).encode()]) + b"\0" + body


JUNK: list[Any] = [
    None, True, -1, 2**63, 10**400, 1e308, "", "x" * 1000, [], [[]], {}, [1] * 5000, ["float32"],
    {"a": [1]}, [-1], [10**6], [0] * 3000, "\ud800", "float32", [2**62] * 9, [0, 0, 0],
]  # fmt: skip


def mutated(
    objects: tuple[str, Mapping[str, bytes]], draw: random.Random
) -> tuple[str, dict[str, bytes]]:
    """Return the upload with one to three random faults."""
    root, contents = objects[0], dict(objects[1])
    for _ in range(draw.randint(1, 3)):
        key = draw.choice(list(contents))
        content = contents[key]
        where = draw.randrange(len(content) + 1)
        match draw.randrange(9):
            case 0:
                contents[key] = content[:where]
            case 1:
                contents[key] = content[:where] + draw.randbytes(8) + content[where + 8 :]
            case 2:
                contents[key] = content[:where] + content[max(0, where - 40) :]
            case 3:
                contents[key] = draw.randbytes(draw.randint(0, 64))
            case 4:
                contents[key] = contents[draw.choice(list(contents))]
            case 5:
                root = key
            case 6 if len(contents) > 1:
                del contents[key]
                root = root if root in contents else next(iter(contents))
            case 7:
                contents[key] = with_body(content, _other_json(content, draw)) if (
                    content.count(b"\0") and content.partition(b"\0")[0].count(b" ") == 2
                ) else b""  # fmt: skip
            case _:
                head, zero, body = content.partition(b"\0")
                contents[key] = head.replace(b" ", b",", draw.randint(0, 2)) + zero + body
    return root, contents


def _other_json(content: bytes, draw: random.Random) -> bytes:
    """Return the object's body with one value replaced by a random one."""
    try:
        body = json.loads(content.partition(b"\0")[2])
        body[draw.choice(list(body))] = draw.choice(JUNK)
    except (ValueError, TypeError, IndexError):
        body = draw.choice(JUNK)
    return json.dumps(body).encode()
