"""Keep what outlives a round about messages: who has the fixed tensors, and which replies are late.

A reply is accepted until its round closes. One that comes later is taken in with a following
round, refused there, and recorded, so that nothing waits for it and nothing is lost about it.
"""

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from ravan_flwr.messages.arrays import FIXED, view_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.server.reply_fetcher import ReplyFetcher

MOST_LATE = 2  # replies of one node that are looked for after their round has closed


class MessageBuilder:
    """Write messages, with the fixed tensors for nodes that lack them; remember late replies."""

    def __init__(self, fixed: ArrayRecord | None) -> None:
        self.fixed: ArrayRecord | None = None
        self._fixed_hash = ""
        if fixed is not None:
            self.keep_fixed(fixed)
        self.inbox = ReplyFetcher()
        self._holders: set[int] = set()  # nodes that have the fixed tensors
        # By message id: whose reply is late, and why it will be refused; "" if it was spare.
        self._late: dict[str, tuple[RegisteredClient, str]] = {}
        self._late_of: dict[int, list[str]] = {}  # by node, the oldest first

    def keep_fixed(self, fixed: ArrayRecord) -> None:
        """Send these to every client once, with the next message that it gets."""
        self.fixed, self._fixed_hash = fixed, checksum(view_record(fixed))

    def message(
        self,
        member: RegisteredClient,
        kind: str,
        number: int,
        arrays: ArrayRecord,
        config: ConfigRecord,
    ) -> Message:
        """Write a message to one client; add the fixed tensors, unless it has them."""
        settings = ConfigRecord({**config, "round": number, "share": member.share})
        content = RecordDict({"arrays": arrays, "config": settings})
        if self.fixed is not None:
            settings["fixed-hash"] = self._fixed_hash
            if member.node_id not in self._holders:
                content[FIXED] = self.fixed
        return Message(content, member.node_id, kind, group_id=str(number))

    def has_answered(self, node_id: int) -> None:
        """Note that a node has the fixed tensors from now on."""
        if self.fixed is not None:
            self._holders.add(node_id)

    def has_failed(self, node_id: int) -> None:
        """Send a node the fixed tensors again: it may have forgotten what it was sent."""
        self._holders.discard(node_id)

    @property
    def late(self) -> list[str]:
        """Return the messages whose replies are late."""
        return list(self._late)

    def expect_late(self, message_id: str, member: RegisteredClient, why: str) -> None:
        """Look for a late reply in the rounds that follow; of one node for the last few only."""
        of_node = self._late_of.setdefault(member.node_id, [])
        if len(of_node) == MOST_LATE:
            del self._late[of_node.pop(0)]
        of_node.append(message_id)
        self._late[message_id] = (member, why)

    def take_late(self, message_id: str) -> tuple[RegisteredClient, str] | None:
        """Return whose late reply this is and why it is refused; None if it is not looked for."""
        found = self._late.pop(message_id, None)
        if found is not None:
            self._late_of[found[0].node_id].remove(message_id)
        return found
