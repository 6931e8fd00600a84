"""Push messages and fetch replies one by one, so that no reply keeps the others waiting."""

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from queue import Empty, Queue

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.flower_private import TaskType
from ravan_flwr.server.superlink import failures_of, fetch
from ravan_flwr.simulated_time.clock import REAL, Clock

STUCK = 2.0  # seconds that others wait for one reply that is being fetched
LEAST_GRACE = 60.0  # seconds for stragglers, unless the run config sets them
GRACE = 10.0  # times what the first half of the replies took, likewise


class RoundDeadline:
    """Tell when to stop waiting: enough replies came, the grace has passed, or the timeout.

    The grace for stragglers begins with the `least`-th reply that was used. With grace None it
    begins when half of those that were asked have answered, and is ten times what that took, at
    least a minute. `enough` replies end the round at once.
    """

    def __init__(
        self,
        timeout: float,
        clients: int,
        least: int = 1,
        grace: float | None = math.inf,
        enough: float = math.inf,
        clock: Clock = REAL,
    ) -> None:
        self.clock, self._began = clock, clock.now
        self._until = self._began + timeout
        self._grace, self._enough = grace, enough
        self._quorum = min(clients, max(least, math.ceil(clients / 2)) if grace is None else least)
        self.used = 0

    def use(self) -> None:
        """Count one more reply that was used."""
        self.used += 1
        if self.used == self._quorum:
            now = self.clock.now
            grace = self._grace
            if grace is None:
                grace = max(LEAST_GRACE, GRACE * (now - self._began))
            self._until = min(self._until, now + grace)

    @property
    def satisfied(self) -> bool:
        """Return whether as many replies were used as were wanted."""
        return self.used >= self._enough

    @property
    def left(self) -> float:
        """Return the seconds that are left to wait."""
        return self._until - self.clock.now

    @property
    def seconds(self) -> float:
        """Return the seconds from the start to the end of waiting."""
        return self._until - self._began


def push(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push, and return those messages that were taken."""
    ids = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in ids]


class ReplyFetcher:
    """Fetch replies in a thread, and start another thread when one reply takes too long.

    To fetch a reply may take minutes: a node may have announced objects that it never uploads.
    The thread that fetches such a reply stays with it, and a new one fetches the others. In one
    process clients run when they are asked for their reply, and nothing is fetched.
    """

    def __init__(self) -> None:
        self._fetching: set[str] = set()
        self._came: Queue[tuple[str, Message | BaseException | None]] = Queue(2)

    def look(self, grid: Grid, ids: Iterable[str]) -> Iterator[Message]:
        """Yield the replies to these messages that are there now."""
        if in_process(grid):
            ids = grid.expect(list(ids))  # type: ignore[attr-defined]
            yield from filter(None, (fetch(grid, message_id) for message_id in ids))
            return
        todo = deque(message_id for message_id in ids if message_id not in self._fetching)
        self._fetching.update(todo)
        try:
            while todo or self._came.qsize():
                failed = failures_of(grid).count
                yield from self._fetch(grid, todo)
                if todo and failures_of(grid).count > failed:
                    return  # the SuperLink fails: more threads would not help
        finally:  # also when nobody wants more
            while (message_id := _next(todo)) is not None:
                self._fetching.discard(message_id)

    def holds(self, message_id: str) -> bool:
        """Return whether the reply to this message is being fetched."""
        return message_id in self._fetching

    def _fetch(self, grid: Grid, todo: deque[str]) -> Iterator[Message]:
        """Let a thread fetch them one by one, until it is done or one takes too long."""
        stop = threading.Event()
        threading.Thread(target=self._walk, args=(grid, todo, stop), daemon=True).start()
        try:
            while True:
                message_id, result = self._came.get(timeout=STUCK)
                if message_id == _DONE:
                    return
                self._fetching.discard(message_id)
                if isinstance(result, BaseException):
                    raise result
                if result is not None:
                    yield result
        except Empty:
            pass  # that thread stays with what it fetches, and the next goes on
        finally:
            stop.set()

    def _walk(self, grid: Grid, todo: deque[str], stop: threading.Event) -> None:
        """Fetch one after the other, and queue what came; an exception is queued as well."""
        while not stop.is_set():
            if (message_id := _next(todo)) is None:
                self._came.put((_DONE, None))
                return
            try:
                self._came.put((message_id, fetch(grid, message_id)))
            except BaseException as error:  # noqa: BLE001 (raised where it is waited for)
                self._came.put((message_id, error))


_DONE = ""  # no message has this id


def _next(todo: deque[str]) -> str | None:
    """Take the next id, which no other thread gets; None if there is none."""
    try:
        return todo.popleft()
    except IndexError:
        return None


def in_process(grid: Grid) -> bool:
    """Return whether clients run when they are asked for their replies."""
    return bool(getattr(grid, "in_process", False))


def processes_of(grid: Grid) -> int | None:
    """Count the processes in which clients in process compute; None where they are elsewhere."""
    return int(getattr(grid, "processes", 1)) if in_process(grid) else None


def simulating(grid: Grid) -> bool:
    """Return whether the clients are simulated, here or by Flower: they are as the server is."""
    return in_process(grid) or grid.run.primary_task_type == TaskType.SIMULATION


def pull_replies(
    grid: Grid,
    inbox: ReplyFetcher,
    waiting: Collection[str],
    deadline: RoundDeadline,
    also: Collection[str] = (),
) -> Iterator[Message]:
    """Yield the replies to these messages as they arrive, until no more are waited for.

    Ask often at first, then less, and once more when the time is up: a reply that was there is
    not lost because another took long to read. Replies to the messages `also` are yielded as
    well, but not waited for.
    """
    left, clock = dict.fromkeys(waiting), deadline.clock
    longest = 0.2 if simulating(grid) else 0.5  # for each reply there is a call of the SuperLink
    pause, last = 0.005, False
    while left and not last:
        last = deadline.left <= 0
        if last and in_process(grid) and clock is REAL:
            return
        began, came = time.monotonic(), False
        for reply in inbox.look(grid, [*left, *also]):
            came = True
            left.pop(reply.metadata.reply_to_message_id, None)
            yield reply
            if (left and deadline.satisfied) or (in_process(grid) and deadline.left <= 0):
                return
        took = time.monotonic() - began
        pause = 0.005 if came else min(pause * 1.5, max(longest, took))
        if left and not came and not last:
            # Simulated time passes by itself to the next reply.
            clock.wait(max(0.0, min(pause if clock is REAL else math.inf, deadline.left)))
