"""Ask a SuperLink again where it fails: it answers HTTP 5xx, or the connection breaks.

No node is to blame for that. Its database is locked while a large message is stored, for example.
Until then it answers calls with 500, and push-object with "not stored". Flower's grid repeats a
call after some of these failures, for ever, and raises the others.
"""

import time
from collections.abc import Callable
from functools import partial
from logging import getLogger
from typing import Any

import httpx
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_utils import ObjectPushError

log = getLogger(__name__)

PAUSE, LONGEST_PAUSE = 0.5, 20.0  # seconds before a call is repeated
QUIET = 60.0  # seconds in which further failures are not logged


class Failures:
    """Count the failures of a SuperLink; log the first of each minute."""

    def __init__(self) -> None:
        self.count, self.last = 0, ""
        self._quiet_until = -1.0

    def note(self, error: Exception) -> None:
        """Count one failure."""
        self.count, self.last = self.count + 1, _shown(error)
        if time.monotonic() >= self._quiet_until:
            self._quiet_until = time.monotonic() + QUIET
            log.warning("the SuperLink fails (%s), and is asked again", self.last)


def failures_of(grid: Grid) -> Failures:
    """Return the failures of a grid's SuperLink so far."""
    failures: Failures = vars(grid).setdefault("failures", Failures())
    return failures


def is_failure(error: BaseException) -> bool:
    """Return whether the SuperLink is to blame: it answered 5xx or not at all, or did not store."""
    if isinstance(error, httpx.HTTPStatusError):
        return error.response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
    return isinstance(error, httpx.TransportError | ObjectPushError)


def ask_again(grid: Grid, timeout: float) -> None:
    """Repeat the grid's calls while the SuperLink fails, for `timeout` seconds at most.

    Pulls are not repeated as a whole, since the inbox asks again. The calls over HTTP are, of
    which a pull consists: the SuperLink hands a reply over once, and its objects after that.
    """
    failures = failures_of(grid)
    for name in ("push_messages", "get_nodes", "get_node_ids"):
        setattr(grid, name, partial(_answer, getattr(grid, name), failures, timeout))
    invoker = getattr(grid, "_retry_invoker", None)  # of Flower's grid over HTTP
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
    """Return what a call returns; RuntimeError if the SuperLink fails until the time is up."""
    until, pause = time.monotonic() + timeout, PAUSE
    while True:
        try:
            return list(call(*arguments))
        except (httpx.HTTPError, ObjectPushError) as error:
            if not is_failure(error):
                raise RuntimeError(
                    f"the SuperLink refuses a call ({_shown(error)}), expected an answer; its log "
                    "has the reason; go on with resume=RUN"
                ) from error
            failures.note(error)
            left = until - time.monotonic()
            if left <= 0:
                raise RuntimeError(
                    f"the SuperLink fails ({_shown(error)}) for round-timeout = {timeout:g} s, "
                    "expected an answer; its log has the reason. A clock that jumped can be one; "
                    "start the SuperLink again, then go on with resume=RUN"
                ) from error
            time.sleep(min(pause, left))
            pause = min(2 * pause, LONGEST_PAUSE)


def _shown(error: Exception) -> str:
    if isinstance(error, httpx.HTTPStatusError):
        return f"HTTP {error.response.status_code}"
    if isinstance(error, ObjectPushError):
        return "an object is not stored"
    return type(error).__name__
