"""Choose how the updates of a round travel: one by one, through a buffer, or as a masked sum."""

from collections.abc import Iterator
from pkgutil import resolve_name
from typing import TYPE_CHECKING

from flwr.app import Message
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.server.replies import Update

if TYPE_CHECKING:
    from ravan_flwr.server.round import Round

# By `Config.transport`. They are imported when a run has them.
TRANSPORTS = {
    "plain": "ravan_flwr.server.transport:Plain",
    "buffered": "ravan_flwr.server.buffered:Buffered",
    "masked": "ravan_flwr.extras.masked:Masked",
}


def transport_of(config: Config) -> "type[Plain]":
    """Find the transport of a run."""
    found: type[Plain] = resolve_name(TRANSPORTS[config.transport])
    return found


class Plain:
    """Read updates one by one, and let the release add them up.

    A round closes when the clients that were drawn have answered, or the deadline has passed.
    """

    enough = 0.0  # replies without which the wait for training does not end
    kind = ""  # of the messages by which clients train; "": the release's
    asks_more = True  # Are further clients asked where too few have replied?

    def __init__(self, round_: "Round") -> None:
        self.round, self.run = round_, round_.run

    @staticmethod
    def cohort(config: Config, partitions: int) -> int:  # noqa: ARG004
        """Return how many clients must be there before a round begins."""
        return config.min_replies

    def draw(self, grid: Grid) -> list[RegisteredClient]:
        """Return the clients that are sent a message when the round opens."""
        return self.round.release.draw(grid)

    def prepare(self, cohort: list[RegisteredClient]) -> list[RegisteredClient]:
        """Return those of a cohort that are asked to train."""
        return cohort

    def address(self, message: Message, member: RegisteredClient) -> Message:  # noqa: ARG002
        """Add to a message what only this client is sent."""
        return message

    def quorum(self, asked: int) -> int:  # noqa: ARG002 (of masks it depends on that)
        """Return with which good reply the straggler timeout begins."""
        return self.round.least

    def replies(self, messages: list[Message], timeout: float) -> Iterator[Message]:
        """Send the messages, and yield the replies that the round waits for."""
        return self.round.send(messages, timeout, training=True)

    def check(self, message: Message, member: RegisteredClient) -> Update:
        """Read the reply of a client; ValueError with the reason why it is rejected."""
        return self.round.release.check(message, member)

    def accumulate(self, update: Update) -> list[list[int]]:
        """Add an update to the sums; return the heads in it, by layer. ValueError as `check`."""
        return self.round.release.add(update)

    def mean(self) -> Tensors:
        """Return what the sums make; ValueError if the round has no effect."""
        return self.round.release.mean()
