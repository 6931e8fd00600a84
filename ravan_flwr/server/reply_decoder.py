"""Fetch a reply as a Message, whatever the node uploaded; nothing else touches it before.

A SuperLink keeps a reply as objects that the node made, and Flower's `HttpGrid.pull_messages` puts
them together and trusts them: one that cannot be put together raises, and the replies that were
fetched in the same call are lost. So replies are fetched one by one, under the id of the message
that they answer, and a reply that is none becomes an error of its node.
"""

import json
from collections.abc import Mapping
from typing import Any

from flwr.app import Array, Error, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import InflatableObject
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from ravan_flwr.messages.plain_text import plain
from ravan_flwr.server.superlink import failures_of, is_failure

UNREADABLE = 1000  # the code of an error that is made here
MOST_BESIDE = 1 << 20  # bytes of a reply beside the bytes of its tensors: names, metrics, reasons
MOST_TIMES = 4  # how much larger a reply may be than what was sent for it ...
ALWAYS_ROOM = 64 << 20  # ... unless it is smaller than this many bytes


def fetch(grid: Grid, message_id: str) -> Message | None:
    """Return the reply to this message, if it is there; an error message if it is no reply.

    An exception is the reply's fault, unless the SuperLink failed: then it is as if the reply
    were not there.
    """
    try:
        replies = list(grid.pull_messages([message_id]))
        return _checked(replies, message_id) if replies else None
    except Exception as error:  # noqa: BLE001 (whatever a node's objects make of Flower's code)
        if is_failure(error):
            failures_of(grid).note(error)
            return None
        return unreadable(message_id, f"{type(error).__name__}: {plain(str(error))}")


def unreadable(message_id: str, why: str) -> Message:
    """Make the error message that replaces a reply that cannot be read."""
    question = Message(RecordDict(), 0, "query")
    question.metadata.__dict__["_message_id"] = message_id  # as Flower's own grids do
    return Message(Error(UNREADABLE, f"its reply cannot be read: {why}"), reply_to=question)


def _checked(replies: list[Message], message_id: str) -> Message:
    """Return the reply that answers the message; TypeError or ValueError if none does."""
    for reply in replies:
        if not isinstance(reply, Message):
            raise TypeError(f"it is a {type(reply).__name__}, expected a Message")
        if reply.metadata.reply_to_message_id != message_id:
            continue
        if reply.has_content():
            _check_types(reply.content)
        return reply
    named = plain(str(replies[0].metadata.reply_to_message_id), 80)
    raise ValueError(f"it answers message {named!r}, expected {message_id!r}")


def _check_types(content: RecordDict) -> None:
    """Check the types of all arrays: Flower checks some, depending on the way a reply took."""
    for record in content.array_records.values():
        for array in record.values():
            kinds = (array.dtype, str), (array.shape, tuple), (array.stype, str)
            if not all(isinstance(value, kind) for value, kind in (*kinds, (array.data, bytes))):
                raise TypeError("it has an array whose dtype, shape, stype or data is of no use")


def weight_of(reply: Message) -> int:
    """Return the bytes of a reply's arrays, whatever is in them."""
    if not reply.has_content():
        return 0
    records = reply.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())


# What Flower makes of small objects may be much larger: a tensor is a list of chunks, and one chunk
# may be listed a thousand times; a list in JSON takes twenty times its bytes. So objects are
# checked before they are put together. Flower has no place for that, so that its function is
# replaced where `HttpGrid` calls it.


def guard() -> None:
    """Check every reply's objects before Flower puts them together, in this process.

    What it has to change takes half a second to import, which a run in process does without.
    """
    from flwr.superlink.grid import http_grid  # noqa: PLC0415

    http_grid.inflate_object_from_contents = _guarded  # type: ignore[attr-defined]


def _guarded(object_id: str, object_contents: dict[str, bytes], **named: Any) -> InflatableObject:
    check_objects(object_contents)
    return inflate_object_from_contents(object_id, object_contents, **named)


def check_objects(contents: Mapping[str, bytes]) -> None:
    """Raise ValueError where a reply would be much larger than its objects."""
    chunk = b"ArrayChunk "
    beside = {key: one for key, one in contents.items() if not one.startswith(chunk)}
    weight = sum(map(len, beside.values()))
    if weight > MOST_BESIDE:
        raise ValueError(
            f"it has {weight} bytes beside its tensors, expected {MOST_BESIDE} at most"
        )
    sizes = {key: len(one) for key, one in contents.items() if key not in beside}
    most = max(MOST_TIMES * (weight + sum(sizes.values())), ALWAYS_ROOM)
    total = sum(_weight_of_array(one, sizes) for one in beside.values())
    if total > most:
        raise ValueError(f"its tensors are {total} bytes from few chunks, expected {most} at most")


def _weight_of_array(content: bytes, sizes: Mapping[str, int]) -> int:
    """Return the bytes of an Array's chunks, each as often as it is listed."""
    head, _, body = content.partition(b"\0")
    kind, children, _ = head.decode().split(" ")
    if kind != Array.__qualname__:
        return 0
    ids = children.split(",")
    return sum(sizes.get(ids[index], 0) for index in json.loads(body)["arraychunk_ids"])
