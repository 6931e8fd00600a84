"""What was sent to whom, and what became of it: the strategy's post.

A reply is accepted until its round closes. One that comes later is taken in with a round that
follows, refused there, and recorded, so that nothing waits for it and nothing is lost about it.
"""

from collections.abc import Callable, Iterator, Mapping

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import FIXED, num_bytes, view_record
from ravan_flwr.messages.member import Member
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.server.envelope import weight_of
from ravan_flwr.server.exchange import Inbox, Patience, in_process, pull_replies, push
from ravan_flwr.server.ledger import Ledger
from ravan_flwr.server.nodes import Node

MOST_LATE = 4  # replies of one node that are looked for after their round has closed


class Mailbox:
    """Messages out, replies in, and who has the method's fixed tensors."""

    def __init__(self, fixed: ArrayRecord | None) -> None:
        self.fixed: ArrayRecord | None = None
        self._fixed_hash = ""
        if fixed is not None:
            self.keep_fixed(fixed)
        self._holders: set[int] = set()  # nodes that have the fixed tensors
        self._sent: dict[str, tuple[Member, int]] = {}  # message id -> whom, how many bytes
        # Whose replies are not wanted any more, and why they are refused; "" if they were spare.
        self._late: dict[str, tuple[Member, str]] = {}
        self._inbox = Inbox()
        self._patience = Patience(0, 0)
        self._nodes: Mapping[int, Node] = {}
        self._kind = ""  # of the messages that replies are waited for
        self._keeps_spare = True

    def keep_fixed(self, fixed: ArrayRecord) -> None:
        """Send these to every client once, with the next message that it gets."""
        self.fixed, self._fixed_hash = fixed, checksum(view_record(fixed))

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
        nodes: Mapping[int, Node],
        patience: Callable[[int], Patience],
        ledger: Ledger,
    ) -> Iterator[Message]:
        """Send, then yield replies as they arrive, until nobody is waited for any more.

        Whoever is silent until then is asked less often from now on.
        """
        self._sent, self._nodes = {}, nodes
        kinds = [message.metadata.message_type.partition(".")[0] for message in messages]
        self._kind = kinds[0] if kinds else ""
        self._keeps_spare = not in_process(grid)  # there a client runs only if it is asked for
        members = {node.node_id: node.member for node in nodes.values() if node.member}
        sizes = [sum(map(num_bytes, m.content.array_records.values())) for m in messages]
        everyone = [members[m.metadata.dst_node_id] for m in messages]
        pushed = {id(m) for m in push(grid, messages)}
        for message, member, size in zip(messages, everyone, sizes, strict=True):
            if id(message) in pushed:
                self._sent[message.metadata.message_id] = (member, size)
            else:
                self.reject(member, "the message could not be sent", ledger)
        self._patience = patience(len(self._sent))
        # Who was silent or refused before is read after those that were not.
        ids = sorted(self._sent, key=lambda key: nodes[self._sent[key][0].node_id].doubt)
        for reply in pull_replies(grid, self._inbox, ids, self._patience, list(self._late)):
            if reply.metadata.reply_to_message_id in self._sent:
                yield reply
            else:
                self._refuse_late(reply, ledger)
        self._close(ledger)

    def _close(self, ledger: Ledger) -> None:
        """Nobody is waited for any more."""
        seconds = f"{self._patience.seconds:.4g}"
        for message_id, (member, size) in self._sent.items():
            ledger.count(0, size)
            if self._patience.satisfied:
                ledger.spare.append(member.partition_id)
                if self._keeps_spare:
                    self._wait_on(message_id, member, "")
                continue
            self.reject(member, f"no reply within {seconds} s", ledger)
            self._nodes[member.node_id].was_silent(self._kind, ledger.number)
            what = f"round {ledger.number}, which closed after {seconds} s"
            self._wait_on(message_id, member, what)

    def _wait_on(self, message_id: str, member: Member, what: str) -> None:
        """Take its reply in with a round that follows; of one node few, since each is asked for
        whenever replies are."""
        of_node = [k for k, (one, _) in self._late.items() if one.node_id == member.node_id]
        for key in of_node[: len(of_node) - MOST_LATE + 1]:
            del self._late[key]
        self._late[message_id] = (member, what)

    def sender(self, reply: Message, ledger: Ledger) -> tuple[Member, int]:
        """Who replied, and the bytes of the message; both ways are counted."""
        member, bytes_down = self._sent.pop(reply.metadata.reply_to_message_id)
        ledger.count(weight_of(reply), bytes_down)
        return member, bytes_down

    def accept(self, member: Member) -> None:
        """A node that answered a message has the fixed tensors from now on."""
        self._patience.use()
        if member.node_id in self._nodes:
            self._nodes[member.node_id].answered(self._kind)
        if self.fixed is not None:
            self._holders.add(member.node_id)

    def reject(self, member: Member, reason: object, ledger: Ledger) -> None:
        """Its reply is not used; it may have forgotten what it was sent."""
        self._holders.discard(member.node_id)
        if member.node_id in self._nodes:
            self._nodes[member.node_id].faults += 1
        ledger.reject(member, reason)

    def _refuse_late(self, reply: Message, ledger: Ledger) -> None:
        found = self._late.pop(reply.metadata.reply_to_message_id, None)
        if found is not None:
            member, what = found
            ledger.count(weight_of(reply), 0)
            if what:
                self.reject(member, f"late: a reply to {what}", ledger)
