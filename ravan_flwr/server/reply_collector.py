"""Send one set of messages of a round and collect the replies to them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import num_bytes
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.server.client_registry import Node
from ravan_flwr.server.message_builder import MessageBuilder
from ravan_flwr.server.reply_decoder import weight_of
from ravan_flwr.server.reply_fetcher import RoundDeadline, in_process, pull_replies, push
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.status import Status
from ravan_flwr.server.superlink import failures_of

Checked = TypeVar("Checked")


class ReplyCollector:
    """Track outstanding messages, collect replies, reject late ones."""

    def __init__(
        self, mail: MessageBuilder, nodes: Mapping[int, Node], round_log: RoundLog, status: Status
    ) -> None:
        self._mail, self._nodes, self._round_log, self._status = mail, nodes, round_log, status
        self._kind = MessageType.TRAIN
        self._outstanding: dict[str, RegisteredClient] = {}  # by message id
        self.sizes: dict[int, int] = {}  # bytes of the message to each node
        self._deadline = RoundDeadline(0, 0)

    def replies(
        self, grid: Grid, messages: list[Message], deadline: Callable[[int], RoundDeadline]
    ) -> Iterator[Message]:
        """Send the messages, then yield replies as they arrive, until no more are waited for.

        `deadline` makes that of so many messages. A node that is silent until then is asked less
        often from now on.
        """
        if messages:  # a calibration is training, too
            self._kind = messages[0].metadata.message_type.partition(".")[0]
        self._send(grid, messages)
        asked, number = self._outstanding.values(), self._round_log.number
        training = "training" if number else "calibrating"
        doing = {MessageType.TRAIN: training, MessageType.EVALUATE: "evaluating"}
        self._status.begin(doing.get(self._kind, "delivering"), number, asked=asked)
        self._deadline = deadline(len(self._outstanding))
        failed = failures_of(grid).count
        for reply in pull_replies(
            grid, self._mail.inbox, self._in_order(), self._deadline, self._mail.late
        ):
            if reply.metadata.reply_to_message_id in self._outstanding:
                yield reply
            else:
                self._refuse_late(reply)
            failed = failures_of(grid).count
        # Where the SuperLink failed after the last reply that came, nobody was silent.
        failure = failures_of(grid).last if failures_of(grid).count > failed else ""
        # In one process a client runs only if it is asked for its reply: none comes later.
        self._close(failure, look_for_late=not in_process(grid))

    def take(
        self,
        replies: Iterable[Message],
        check: Callable[[Message, RegisteredClient], Checked],
        accumulate: Callable[[Checked], object],
    ) -> None:
        """Check and accumulate replies one by one; a ValueError of either rejects the reply."""
        for message in replies:
            member = self._outstanding.pop(message.metadata.reply_to_message_id)
            node = self._nodes[member.node_id]
            self._round_log.count(weight_of(message), self.sizes[member.node_id])
            self._status.answered(node, member)
            try:
                accumulate(check(message, member))
            except ValueError as error:
                self.reject(member, error)
            else:  # its node is there, and has the fixed tensors
                self._deadline.use()
                node.answered(self._kind)
                self._mail.has_answered(member.node_id)

    def expect(self, message: Message, member: RegisteredClient) -> None:
        """Wait for the reply to a message that was sent."""
        self._outstanding[message.metadata.message_id] = member
        self.sizes[member.node_id] = sum(map(num_bytes, message.content.array_records.values()))

    def reject(self, member: RegisteredClient, reason: object) -> None:
        """Note that a reply is not used, and why."""
        self._mail.has_failed(member.node_id)
        self._nodes[member.node_id].faults += 1
        self._round_log.reject(member, reason)

    def _send(self, grid: Grid, messages: list[Message]) -> None:
        """Push the messages; a member whose message is not taken is rejected."""
        asked = (self._nodes[message.metadata.dst_node_id] for message in messages)
        members = {node.node_id: node.member for node in asked if node.member}
        pushed = {id(message) for message in push(grid, messages)}
        for message in messages:
            member = members[message.metadata.dst_node_id]
            if id(message) in pushed:
                self.expect(message, member)
            else:
                self.reject(member, "the message could not be sent")

    def _in_order(self) -> list[str]:
        """Sort the outstanding messages: nodes that were silent or refused before come last."""
        doubts = {
            message_id: self._nodes[member.node_id].doubt
            for message_id, member in self._outstanding.items()
        }
        return sorted(doubts, key=lambda message_id: doubts[message_id])

    def _close(self, failure: str, *, look_for_late: bool) -> None:
        """Stop waiting: the replies that are missing are spare, or their nodes were silent.

        Or the SuperLink failed: then they are rejected, and their nodes are asked as before.
        """
        seconds, number = f"{self._deadline.seconds:.4g}", self._round_log.number
        for message_id, member in self._outstanding.items():
            self._round_log.count(0, self.sizes[member.node_id])
            if self._deadline.satisfied:
                why = ""
                self._round_log.spare.append(member.partition_id)
            elif failure:
                why = ""
                self._mail.has_failed(member.node_id)  # it may not have got the message
                self._round_log.reject(
                    member, f"no reply within {seconds} s, since the SuperLink failed ({failure})"
                )
            else:
                self.reject(member, f"no reply within {seconds} s")
                self._nodes[member.node_id].was_silent(self._kind, number)
                why = f"late: a reply to round {number}, which closed after {seconds} s"
            if look_for_late:
                self._mail.expect_late(message_id, member, why)

    def _refuse_late(self, reply: Message) -> None:
        """Count a late reply, and reject it unless it was spare."""
        found = self._mail.take_late(reply.metadata.reply_to_message_id)
        if found is not None:
            member, why = found
            self._round_log.count(weight_of(reply), 0)
            self._nodes[member.node_id].heard = time.time()
            if why:
                self.reject(member, why)
