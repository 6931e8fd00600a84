"""What was sent to whom, and what became of it: the strategy's post.

A reply is accepted until its round closes. One that comes later is taken in with a round that
follows, refused there, and recorded, so that nothing waits for it and nothing is lost about it.
"""

from collections.abc import Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.exchange import pull_replies, push
from ravan_flwr.ledger import Ledger
from ravan_flwr.payload import FIXED, hash_of, num_bytes
from ravan_flwr.roster import Member


class Mailbox:
    """Messages out, replies in, and who has the method's fixed tensors."""

    def __init__(self, fixed: ArrayRecord | None) -> None:
        self.fixed: ArrayRecord | None = None
        self._fixed_hash = ""
        if fixed is not None:
            self.keep_fixed(fixed)
        self._holders: set[int] = set()  # nodes that have the fixed tensors
        self._sent: dict[str, tuple[Member, int]] = {}  # message id -> whom, how many bytes
        self._late: dict[str, tuple[Member, str]] = {}  # whose replies are not wanted any more

    def keep_fixed(self, fixed: ArrayRecord) -> None:
        """Send these to every client once, with the next message that it gets."""
        self.fixed, self._fixed_hash = fixed, hash_of(fixed)

    def message(
        self, member: Member, kind: str, number: int, arrays: ArrayRecord, config: ConfigRecord
    ) -> Message:
        """For one client; with the fixed tensors, unless it has them."""
        settings = ConfigRecord({**config, "round": number, "share": member.share})
        content = RecordDict({"arrays": arrays, "config": settings})
        if self.fixed is not None:
            settings["fixed-hash"] = self._fixed_hash
            if member.node_id not in self._holders:
                content[FIXED] = self.fixed
        return Message(content, member.node_id, kind, group_id=str(number))

    def exchange(
        self,
        grid: Grid,
        messages: list[Message],
        members: Mapping[int, Member],
        timeout: float,
        ledger: Ledger,
    ) -> Iterator[Message]:
        """Send, then yield replies as they arrive, until all came or the time is up."""
        self._sent = {}
        sizes = [sum(map(num_bytes, m.content.array_records.values())) for m in messages]
        everyone = [members[m.metadata.dst_node_id] for m in messages]
        pushed = {id(m) for m in push(grid, messages)}
        for message, member, size in zip(messages, everyone, sizes, strict=True):
            if id(message) in pushed:
                self._sent[message.metadata.message_id] = (member, size)
            else:
                self.reject(member, "the message could not be sent", ledger)
        for reply in pull_replies(grid, set(self._sent), timeout, list(self._late)):
            if reply.metadata.reply_to_message_id in self._sent:
                yield reply
            else:
                self._refuse_late(reply, ledger)
        for message_id, (member, size) in self._sent.items():
            ledger.count(0, size)
            self.reject(member, f"no reply within {timeout:g} s", ledger)
            what = f"round {ledger.number}, which closed after {timeout:g} s"
            self._late[message_id] = (member, what)

    def sender(self, reply: Message, ledger: Ledger) -> tuple[Member, int]:
        """Who replied, and the bytes of the message; both ways are counted."""
        member, bytes_down = self._sent.pop(reply.metadata.reply_to_message_id)
        ledger.count(_bytes_of(reply), bytes_down)
        return member, bytes_down

    def accept(self, member: Member) -> None:
        """A node that answered a message has the fixed tensors from now on."""
        if self.fixed is not None:
            self._holders.add(member.node_id)

    def reject(self, member: Member, reason: object, ledger: Ledger) -> None:
        """Its reply is not used; it may have forgotten what it was sent."""
        self._holders.discard(member.node_id)
        ledger.reject(member, reason)

    def _refuse_late(self, reply: Message, ledger: Ledger) -> None:
        found = self._late.pop(reply.metadata.reply_to_message_id, None)
        if found is not None:
            member, what = found
            ledger.count(_bytes_of(reply), 0)
            self.reject(member, f"late: a reply to {what}", ledger)


def _bytes_of(reply: Message) -> int:
    """What a reply's arrays weigh, whatever is in them."""
    return sum(map(num_bytes, reply.content.array_records.values())) if reply.has_content() else 0
