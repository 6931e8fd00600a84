"""Fetch replies from a SuperLink one by one, also malformed ones, and repeat calls when it fails.

A SuperLink keeps a reply as objects made by the node. Flower's `HttpGrid.pull_messages` assembles
them and trusts them: a malformed reply raises an error, and the other replies of the same call are
lost. So replies are fetched one by one, by the id of the message that they answer, and no reply
delays the others. A malformed reply becomes an error message of its node.

If the SuperLink answers HTTP 5xx, or the connection breaks, the node is not at fault. For example,
the database is locked while a large message is stored. Meanwhile the SuperLink answers calls with
500, and push-object with "not stored". Flower's grid repeats a call without end after some of these
failures, and raises the others.
"""

import json
import time
from collections.abc import Callable, Mapping
from functools import partial
from logging import getLogger
from typing import Any

import httpx
from flwr.app import Array, Error, Message, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.flower_private import (
    ObjectPushError,
    check_before_inflating,
    find_retry_invoker,
    set_message_id,
)
from ravan_flwr.messages.plain_text import plain

log = getLogger(__name__)

PAUSE, MAX_PAUSE = 0.5, 20.0  # seconds before a call is repeated
UNREADABLE = 1000  # the code of the error messages made here
MAX_METADATA = 1 << 20  # bytes of a reply without its tensors: names, metrics, reasons
MAX_EXPANSION = 4  # how many times larger than its uploaded objects an assembled reply may be ...
ALWAYS_ROOM = 64 << 20  # ... if it has more than this many bytes
LOG_INTERVAL = 60.0  # seconds after a logged failure in which no further failure is logged


class Failures:
    """Count the failures of a SuperLink; log the first of each minute."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""
        self._quiet_until = -1.0

    def note(self, error: Exception) -> None:
        """Count a failure; log it if none was logged in the last minute."""
        self.count, self.last = self.count + 1, _shown(error)
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + LOG_INTERVAL
            log.warning("the SuperLink fails (%s), and is asked again", self.last)


def find_failures(grid: Grid) -> Failures:
    """Return the count of failures of a grid's SuperLink."""
    failures: Failures = vars(grid).setdefault("failures", Failures())
    return failures


def is_failure(error: BaseException) -> bool:
    """Return whether an error is the SuperLink's: HTTP 5xx, no answer, or an object not stored."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError | ObjectPushError)


def retry_failed_calls(grid: Grid, timeout: float) -> None:
    """Make the grid repeat its calls while the SuperLink fails, for `timeout` seconds at most.

    A pull is not repeated as a whole, since `ReplyFetcher` pulls again. But its single HTTP calls
    are: the SuperLink returns a reply only once, and its objects after that.
    """
    failures = find_failures(grid)
    for name in ("push_messages", "get_nodes", "get_node_ids"):
        setattr(grid, name, partial(_answer, getattr(grid, name), failures, timeout))
    invoker = find_retry_invoker(grid)
    if invoker is None:
        return
    gives_up, backs_off = invoker.should_giveup, invoker.on_backoff

    def should_give_up(error: Exception) -> bool:
        return not is_failure(error) and bool(gives_up(error))

    def back_off(state: Any) -> None:
        failures.note(state.exception)
        backs_off(state)

    invoker.should_giveup, invoker.on_backoff = should_give_up, back_off
    invoker.max_time = timeout


def _answer(
    call: Callable[..., Any], failures: Failures, timeout: float, *arguments: Any
) -> list[Any]:
    """Return the call's result; raise RuntimeError if the SuperLink fails until the timeout."""
    until, pause = time.monotonic() + timeout, PAUSE
    while True:
        try:
            return list(call(*arguments))
        except (httpx.HTTPError, ObjectPushError) as error:
            if not is_failure(error):
                raise RuntimeError(
                    f"the SuperLink refuses a call ({_shown(error)}), expected an answer; its log "
                    "has the reason; continue with resume=RUN"
                ) from error
            failures.note(error)
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"the SuperLink fails ({_shown(error)}) for round-timeout = {timeout:g} s, "
                    "expected an answer; its log has the reason, for example a clock that jumped; "
                    "start the SuperLink again, then continue with resume=RUN"
                ) from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, MAX_PAUSE)


def _shown(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, ObjectPushError):
        return "an object is not stored"
    return type(error).__name__


def fetch(grid: Grid, message_id: str) -> Message | None:
    """Return the reply to a message; None before it arrives, an error message if it is malformed.

    An exception makes an error message. If the SuperLink failed, the function returns None.
    """
    try:
        replies = list(grid.pull_messages([message_id]))
        return _checked(replies, message_id) if replies else None
    except Exception as error:  # noqa: BLE001 (a node's objects can cause any exception)
        if is_failure(error):
            find_failures(grid).note(error)
            return None
        return unreadable(message_id, f"{type(error).__name__}: {plain(str(error))}")


def unreadable(message_id: str, why: str) -> Message:
    """Return the error message that replaces an unreadable reply."""
    question = Message(RecordDict(), 0, "query")
    set_message_id(question, message_id)
    return Message(Error(UNREADABLE, f"its reply cannot be read: {why}"), reply_to=question)


def _checked(replies: list[Message], message_id: str) -> Message:
    """Return the reply to the message; raise TypeError or ValueError if there is no valid one."""
    for reply in replies:
        if not isinstance(reply, Message):
            raise TypeError(f"it is a {type(reply).__name__}, expected a Message")
        if reply.metadata.reply_to_message_id != message_id:
            continue
        records = reply.content.array_records.values() if reply.has_content() else ()
        for array in (array for record in records for array in record.values()):
            # Flower checks only some of these types, depending on the transport.
            types = (array.dtype, str), (array.shape, tuple), (array.stype, str)
            if not all(
                isinstance(value, expected_type)
                for value, expected_type in (*types, (array.data, bytes))
            ):
                raise TypeError("it has an array whose dtype, shape, stype or data is of no use")
        return reply
    named = plain(str(replies[0].metadata.reply_to_message_id), 80)
    raise ValueError(f"it answers message {named!r}, expected {message_id!r}")


# Small objects can become a much larger reply: a tensor is a list of chunks, and one chunk may be
# listed a thousand times; a parsed JSON list takes twenty times its bytes. So objects are checked
# before Flower assembles them. Flower has no hook for that, so its function is replaced where
# `HttpGrid` calls it.


def install_object_check() -> None:
    """Make Flower check every reply's objects before it assembles them, in this process."""
    check_before_inflating(check_objects)


def check_objects(contents: Mapping[str, bytes]) -> None:
    """Raise ValueError if an assembled reply would be much larger than its objects."""
    chunk = b"ArrayChunk "
    non_chunks = {key: data for key, data in contents.items() if not data.startswith(chunk)}
    weight = sum(map(len, non_chunks.values()))
    if weight > MAX_METADATA:
        raise ValueError(
            f"it has {weight} bytes beside its tensors, expected {MAX_METADATA} at most"
        )
    sizes = {key: len(data) for key, data in contents.items() if key not in non_chunks}
    limit = max(MAX_EXPANSION * (weight + sum(sizes.values())), ALWAYS_ROOM)
    total = sum(_weight_of_array(data, sizes) for data in non_chunks.values())
    if total > limit:
        raise ValueError(f"its tensors are {total} bytes from few chunks, expected {limit} at most")


def _weight_of_array(content: bytes, sizes: Mapping[str, int]) -> int:
    """Return the bytes of an Array's chunks, each counted as often as it is listed."""
    head, _, body = content.partition(b"\0")
    type_name, children, _ = head.decode().split(" ")
    if type_name != Array.__qualname__:
        return 0
    ids = children.split(",")
    return sum(sizes.get(ids[index], 0) for index in json.loads(body)["arraychunk_ids"])


def push(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push the messages; return those that the SuperLink took."""
    ids = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in ids]
