"""Send one set of messages of a round and collect the replies to them."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping

from flwr.app import Message, MessageType
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import num_bytes
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.server.message_builder import MessageBuilder
from ravan_flwr.server.nodes import Node
from ravan_flwr.server.reply_decoder import weight_of
from ravan_flwr.server.reply_fetcher import in_process, pull_replies, push
from ravan_flwr.server.round_deadline import RoundDeadline
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.status import Status
from ravan_flwr.server.superlink import failures_of


class ReplyCollector:
    """Track outstanding messages, collect replies, reject late ones."""

    def __init__(
        self, mail: MessageBuilder, nodes: Mapping[int, Node], round_log: RoundLog, status: Status
    ) -> None:
        self._mail, self._nodes, self._round_log, self._status = mail, nodes, round_log, status
        self._kind = MessageType.TRAIN
        self._outstanding: dict[
            str, tuple[RegisteredClient, int]
        ] = {}  # by message id; and its bytes
        self._patience = RoundDeadline(0, 0)

    def replies(
        self, grid: Grid, messages: list[Message], patience: Callable[[int], RoundDeadline]
    ) -> Iterator[Message]:
        """Send the messages, then yield replies as they arrive, until no more are waited for.

        `patience` is told how many messages were sent. A node that is silent until then is asked
        less often from now on.
        """
        if messages:  # a calibration is training, too
            self._kind = messages[0].metadata.message_type.partition(".")[0]
        self._send(grid, messages)
        asked = [member for member, _ in self._outstanding.values()]
        self._status.begin(self._doing, self._round_log.number, asked=asked)
        self._patience = patience(len(self._outstanding))
        failed = failures_of(grid).count
        for reply in pull_replies(
            grid, self._mail.inbox, self._in_order(), self._patience, self._mail.late
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
        self, replies: Iterable[Message], take: Callable[[Message, RegisteredClient, int], None]
    ) -> None:
        """Take the replies one by one; one that makes `take` raise ValueError is rejected."""
        for message in replies:
            member, bytes_down = self._sender(message)
            try:
                take(message, member, bytes_down)
            except ValueError as error:
                self.reject(member, error)
            else:
                self._accept(member)

    def expect(self, message: Message, member: RegisteredClient) -> None:
        """Wait for the reply to a message that was sent."""
        size = sum(map(num_bytes, message.content.array_records.values()))
        self._outstanding[message.metadata.message_id] = (member, size)

    def _sender(self, reply: Message) -> tuple[RegisteredClient, int]:
        """Return who replied, and the bytes of the message; count the bytes of both."""
        member, bytes_down = self._outstanding.pop(reply.metadata.reply_to_message_id)
        self._round_log.count(weight_of(reply), bytes_down)
        self._status.answered(self._nodes[member.node_id], member)
        return member, bytes_down

    def _accept(self, member: RegisteredClient) -> None:
        """Note that a reply was used: its node is there, and has the fixed tensors."""
        self._patience.use()
        self._nodes[member.node_id].answered(self._kind)
        self._mail.has_answered(member.node_id)

    def reject(self, member: RegisteredClient, reason: object) -> None:
        """Note that a reply is not used, and why."""
        self._mail.has_failed(member.node_id)
        self._nodes[member.node_id].faults += 1
        self._round_log.reject(member, reason)

    @property
    def _doing(self) -> str:
        """Name the step that these messages are of."""
        if self._kind == MessageType.TRAIN:
            return "training" if self._round_log.number else "calibrating"
        return "evaluating" if self._kind == MessageType.EVALUATE else "delivering"

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
            for message_id, (member, _) in self._outstanding.items()
        }
        return sorted(doubts, key=lambda message_id: doubts[message_id])

    def _close(self, failure: str, *, look_for_late: bool) -> None:
        """Stop waiting: the replies that are missing are spare, or their nodes were silent.

        Or the SuperLink failed: then they are rejected, and their nodes are asked as before.
        """
        seconds, number = f"{self._patience.seconds:.4g}", self._round_log.number
        for message_id, (member, size) in self._outstanding.items():
            self._round_log.count(0, size)
            if self._patience.satisfied:
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
