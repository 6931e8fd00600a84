"""Messages out, replies in: what every exchange with nodes needs, whatever it is about."""

import time
from collections.abc import Collection, Iterator

from flwr.app import Message
from flwr.serverapp import Grid


def push(grid: Grid, messages: list[Message]) -> list[Message]:
    """Push, and return those messages that were taken."""
    taken = set(grid.push_messages(messages))
    return [message for message in messages if message.metadata.message_id in taken]


def pull_replies(
    grid: Grid, waiting: set[str], timeout: float, also: Collection[str] = ()
) -> Iterator[Message]:
    """Replies to these messages as they arrive; polls often at first, then less.

    Replies to the messages `also` are passed on, too, but not waited for.
    """
    deadline = time.monotonic() + timeout
    pause = 0.005
    while waiting and time.monotonic() < deadline:
        came = False
        for reply in grid.pull_messages({*waiting, *also}):
            came = True
            waiting.discard(reply.metadata.reply_to_message_id)
            yield reply
        pause = 0.005 if came else min(pause * 1.5, 0.2)
        if not came:
            time.sleep(pause)
