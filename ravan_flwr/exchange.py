"""Messages out, replies in: what every exchange with nodes needs, whatever it is about."""

import math
import time
from collections.abc import Iterator, Mapping
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid


def push(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push, and return those messages that were taken."""
    taken = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in taken]


def pull_replies(grid: Grid, waiting: set[str], timeout: float) -> Iterator[Message]:
    """Replies to these messages as they arrive; polls often at first, then less."""
    deadline = time.monotonic() + timeout
    pause = 0.005
    while waiting and time.monotonic() < deadline:
        came = False
        for reply in grid.pull_messages(waiting):
            if reply.metadata.reply_to_message_id in waiting:
                came = True
                waiting.remove(reply.metadata.reply_to_message_id)
                yield reply
        pause = 0.005 if came else min(pause * 1.5, 0.2)
        if not came:
            time.sleep(pause)


def content_of(reply: Message) -> RecordDict:
    """What a reply brings; ValueError with the node's reason if it brings an error."""
    if reply.has_error():
        reason = (reply.error.reason or "").strip() or "no reason given"
        raise ValueError(f"it failed with code {reply.error.code}: {reason}")
    return reply.content


def check_round(metrics: Mapping[str, Any], expected: int) -> None:
    """Raise ValueError unless a reply is of the round that is running."""
    if metrics["round"] != expected:
        raise ValueError(f"reply is of round {metrics['round']}, expected {expected}")


def finite(metrics: Mapping[str, Any], key: str) -> float:
    """One number of a reply, which must be one and finite."""
    value = metrics[key]
    if isinstance(value, list) or not math.isfinite(value):
        raise ValueError(f"{key} is {value!r}, expected a finite number")
    return float(value)
