"""Wait for the replies of a round: until a timeout, a straggler timeout, or enough replies."""

import math
import threading
import time
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from queue import Empty, Queue

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.server.runtime import in_process, simulating
from ravan_flwr.server.superlink_calls import fetch, find_failures
from ravan_flwr.simulated_time.clock import REAL, Clock

MAX_FETCH_SECONDS = 2.0  # seconds that the other replies wait for a reply that is being fetched
FEW_THREADS = 16  # with more threads that fetch replies, the others wait longer
MIN_GRACE = 60.0  # seconds: the shortest automatic straggler timeout
GRACE = 10.0  # times the duration of the first half of the replies: the automatic timeout


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


class ReplyFetcher:
    """Fetch replies in a thread, and start another thread when one reply takes too long.

    Fetching a reply may take minutes: a node may have announced objects that it never uploads. The
    thread that fetches such a reply stays with it, and a new thread fetches the others. In one
    process no thread is needed: fetching a reply runs the client.

    On a slow link every reply takes long, and more threads would only share it, each with a reply
    in memory. So with many threads the next one starts later: after an hour in which no reply
    arrives, there are about 75.
    """

    def __init__(self) -> None:
        self._fetching: set[str] = set()
        self._threads: list[threading.Thread] = []
        # Message ids with their replies; and `_DONE`, with the event that its thread was given.
        self._came: Queue[tuple[str, Message | BaseException | threading.Event | None]] = Queue(2)

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
        thread = threading.Thread(target=self._walk, args=(grid, todo, stop), daemon=True)
        thread.start()
        self._threads = [*filter(threading.Thread.is_alive, self._threads), thread]
        patience = MAX_FETCH_SECONDS * max(1, 1 + len(self._threads) - FEW_THREADS)
        try:
            while True:
                message_id, result = self._came.get(timeout=patience)
                if isinstance(result, threading.Event):
                    if result is stop:
                        return
                    continue  # of an earlier thread, whose caller stopped early
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
                self._came.put((_DONE, stop))
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
