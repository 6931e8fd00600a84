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
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from logging import getLogger
from queue import Empty, Queue
from typing import Any

import httpx
from flwr.app import Array, Error, Message, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.flower_private import (
    ObjectPushError,
    TaskType,
    check_before_inflating,
    find_retry_invoker,
    set_message_id,
)
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.simulated_time.clock import REAL, Clock

log = getLogger(__name__)

PAUSE, MAX_PAUSE = 0.5, 20.0  # seconds before a call is repeated
UNREADABLE = 1000  # the code of the error messages made here
MAX_METADATA = 1 << 20  # bytes of a reply without its tensors: names, metrics, reasons
MAX_EXPANSION = 4  # how many times larger than its uploaded objects an assembled reply may be ...
ALWAYS_ROOM = 64 << 20  # ... if it has more than this many bytes
MAX_FETCH_SECONDS = 2.0  # seconds that the other replies wait for a reply that is being fetched
MIN_GRACE = 60.0  # seconds: the shortest automatic straggler timeout
GRACE = 10.0  # times the duration of the first half of the replies: the automatic timeout
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
            kinds = (array.dtype, str), (array.shape, tuple), (array.stype, str)
            if not all(isinstance(value, kind) for value, kind in (*kinds, (array.data, bytes))):
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
    kind, children, _ = head.decode().split(" ")
    if kind != Array.__qualname__:
        return 0
    ids = children.split(",")
    return sum(sizes.get(ids[index], 0) for index in json.loads(body)["arraychunk_ids"])


# Replies as they arrive, and the end of the wait for them.


class RoundDeadline:
    """The end of the wait for replies: a timeout, a straggler timeout, or enough replies.

    The straggler timeout (`grace`) begins with the `quorum`-th reply that was used. If it is None,
    it begins when at least half of the clients have replied. It is then ten times the time that
    these took, at least a minute. `enough` replies end the wait at once.
    """

    def __init__(
        self,
        timeout: float,
        clients: int,
        quorum: int = 1,
        grace: float | None = math.inf,
        enough: float = math.inf,
        clock: Clock = REAL,
    ) -> None:
        self.clock, self._began = clock, clock.now
        self._until = self._began + timeout
        self._grace, self._enough = grace, enough
        half = math.ceil(clients / 2)
        self._quorum = min(clients, max(quorum, half) if grace is None else quorum)
        self.used = 0

    def use(self) -> None:
        """Count a reply that was used."""
        self.used += 1
        if self.used == self._quorum:
            now = self.clock.now
            grace = self._grace
            if grace is None:
                grace = max(MIN_GRACE, GRACE * (now - self._began))
            self._until = min(self._until, now + grace)

    @property
    def satisfied(self) -> bool:
        """Return whether `enough` replies were used."""
        return self.used >= self._enough

    @property
    def left(self) -> float:
        """Return the seconds left until the deadline."""
        return self._until - self.clock.now

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the deadline."""
        return self._until - self._began


def push(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push the messages; return those that the SuperLink took."""
    ids = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in ids]


class ReplyFetcher:
    """Fetch replies in a thread, and start another thread when one reply takes too long.

    Fetching a reply may take minutes: a node may have announced objects that it never uploads. The
    thread that fetches such a reply stays with it, and a new thread fetches the others. In one
    process no thread is needed: fetching a reply runs the client.
    """

    def __init__(self) -> None:
        self._fetching: set[str] = set()
        self._came: Queue[tuple[str, Message | BaseException | None]] = Queue(2)

    def fetch_ready(self, grid: Grid, ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to these messages that have arrived."""
        if in_process(grid):
            ids = grid.expect(list(ids))  # type: ignore[attr-defined]
            yield from filter(None, (fetch(grid, message_id) for message_id in ids))
            return
        todo = deque(message_id for message_id in ids if message_id not in self._fetching)
        self._fetching.update(todo)
        try:
            while todo or self._came.qsize():
                failed = find_failures(grid).count
                yield from self._fetch(grid, todo)
                if todo and find_failures(grid).count > failed:
                    return  # the SuperLink fails: more threads would not help
        finally:  # also when the caller stops early
            while (message_id := _next(todo)) is not None:
                self._fetching.discard(message_id)

    def is_fetching(self, message_id: str) -> bool:
        """Return whether the reply to this message is being fetched."""
        return message_id in self._fetching

    def _fetch(self, grid: Grid, todo: deque[str]) -> Iterator[Message]:
        """Yield replies that a thread fetches, until it is done or a reply takes too long."""
        stop = threading.Event()
        threading.Thread(target=self._walk, args=(grid, todo, stop), daemon=True).start()
        try:
            while True:
                message_id, result = self._came.get(timeout=MAX_FETCH_SECONDS)
                if message_id == _DONE:
                    return
                self._fetching.discard(message_id)
                if isinstance(result, BaseException):
                    raise result
                if result is not None:
                    yield result
        except Empty:
            pass  # this thread stays with its reply; another thread fetches the others
        finally:
            stop.set()

    def _walk(self, grid: Grid, todo: deque[str], stop: threading.Event) -> None:
        """Fetch replies one after the other, and queue them; exceptions are queued as well."""
        while not stop.is_set():
            if (message_id := _next(todo)) is None:
                self._came.put((_DONE, None))
                return
            try:
                self._came.put((message_id, fetch(grid, message_id)))
            except BaseException as error:  # noqa: BLE001 (`_fetch` raises it)
                self._came.put((message_id, error))


_DONE = ""  # no message has this id


def _next(todo: deque[str]) -> str | None:
    """Remove and return the next id, atomically; None if there is none."""
    try:
        return todo.popleft()
    except IndexError:
        return None


def in_process(grid: Grid) -> bool:
    """Return whether clients run in this process, when their replies are fetched."""
    return bool(getattr(grid, "in_process", False))


def count_processes(grid: Grid) -> int | None:
    """Return the number of processes of an in-process run; None for Flower's runtimes."""
    return int(getattr(grid, "processes", 1)) if in_process(grid) else None


def simulating(grid: Grid) -> bool:
    """Return whether clients are simulated, in process or by Flower: they have this setup, too."""
    return in_process(grid) or grid.run.primary_task_type == TaskType.SIMULATION


def pull_replies(
    grid: Grid,
    inbox: ReplyFetcher,
    waiting: Collection[str],
    deadline: RoundDeadline,
    also: Collection[str] = (),
) -> Iterator[Message]:
    """Yield the replies to these messages as they arrive, until the deadline.

    Poll often at first, then less often, and once more at the deadline: a reply that has arrived is
    not lost because another one took long to read. Replies to the messages `also` are yielded as
    well, but the function does not wait for them.
    """
    left, clock = dict.fromkeys(waiting), deadline.clock
    max_pause = 0.2 if simulating(grid) else 0.5  # each reply costs a call of the SuperLink
    pause, last = 0.005, False
    while left and not last:
        last = deadline.left <= 0
        if last and in_process(grid) and clock is REAL:
            return
        began, came = time.monotonic(), False
        for reply in inbox.fetch_ready(grid, [*left, *also]):
            came = True
            left.pop(reply.metadata.reply_to_message_id, None)
            yield reply
            if (left and deadline.satisfied) or (in_process(grid) and deadline.left <= 0):
                return
        took = time.monotonic() - began
        pause = 0.005 if came else min(pause * 1.5, max(max_pause, took))
        if left and not came and not last:
            # Simulated time jumps to the next reply.
            clock.wait(max(0.0, min(pause if clock is REAL else math.inf, deadline.left)))
