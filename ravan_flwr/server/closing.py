"""Choose when a round closes: when its clients have answered, or when a buffer is full."""

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.server.replies import Update

if TYPE_CHECKING:
    from ravan_flwr.server.round import Round

# By `aggregation`. They are imported when a run has them.
CLOSINGS = {
    "sync": "ravan_flwr.server.closing:Synchronous",
    "async": "ravan_flwr.server.buffered:Buffered",
}


def closing_of(config: Config) -> "type[Synchronous]":
    """Find when the rounds of a run close."""
    found: type[Synchronous] = resolve_name(CLOSINGS[config.aggregation])
    return found


class Synchronous:
    """Close when the clients that were drawn have answered, or the deadline has passed."""

    asks_more = True  # Are further clients asked where too few have replied?

    def __init__(self, round_: "Round") -> None:
        self.round, self.run = round_, round_.run

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Return the clients that are sent a message when the round opens."""
        return self.round.release.draw(grid)

    def replies(self, messages: list[Message], timeout: float) -> Iterator[Message]:
        """Send the messages, and yield the replies that the round waits for."""
        return self.round.send(messages, timeout, training=True)

    def check(self, message: Message, member: RegisteredClient) -> Update:
        """Read the reply of a client; ValueError with the reason why it is rejected."""
        return self.round.transport.check(message, member)
