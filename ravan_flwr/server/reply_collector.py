"""Write the messages of a round, send them, and collect the replies.

A reply is accepted until its round closes. A later reply is fetched in a following round, rejected
and recorded there, so that no round waits for it and the log is complete.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.messages.arrays import FIXED, array_bytes, to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.server.client_registry import Node
from ravan_flwr.server.reply_fetcher import (
    ReplyFetcher,
    RoundDeadline,
    in_process,
    pull_replies,
    push,
)
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.superlink import failures_of
from ravan_flwr.simulated_time.clock import clock_of
from ravan_flwr.specs import Scalar

Checked = TypeVar("Checked")


class MessageBuilder:
    """Write messages, with the fixed tensors for nodes that lack them."""

    def __init__(self, nodes: Mapping[int, Node], fixed: Tensors | None) -> None:
        self.nodes, self.inbox = nodes, ReplyFetcher()
        self.fixed: ArrayRecord | None = None
        self._fixed_hash = ""
        if fixed is not None:
            self.keep_fixed(fixed)

    def keep_fixed(self, fixed: Tensors) -> None:
        """Add these tensors to the next message of every client that lacks them."""
        self.fixed, self._fixed_hash = to_record(fixed), checksum(fixed)

    def message(
        self,
        client: RegisteredClient,
        kind: str,
        number: int,
        arrays: ArrayRecord,
        config: Mapping[str, Scalar],
    ) -> Message:
        """Return a message to one client; add the fixed tensors unless the client has them."""
        settings = ConfigRecord(
            {**config, "round": number, "budget-fraction": client.budget_fraction}
        )
        content = RecordDict({"arrays": arrays, "config": settings})
        if self.fixed is not None:
            settings["fixed-hash"] = self._fixed_hash
            if not self.nodes[client.node_id].has_fixed:
                content[FIXED] = self.fixed
        return Message(content, client.node_id, kind, group_id=str(number))


@dataclass(frozen=True)
class Sent:
    """A message that was sent and has no reply yet."""

    client: RegisteredClient
    number: int  # of the round
    size: int  # in bytes
    time: float  # when it was sent


class ReplyCollector:
    """Track outstanding messages, collect replies, reject late ones."""

    def __init__(self, message_builder: MessageBuilder, round_log: RoundLog) -> None:
        self._message_builder, self._nodes = message_builder, message_builder.nodes
        self._round_log = round_log
        self._kind = MessageType.TRAIN
        self.outstanding: dict[str, Sent] = {}  # by message id
        self.deadline = RoundDeadline(0, 0)

    def replies(
        self, grid: Grid, messages: list[Message], timeout: float, least: int,
        grace: float | None = math.inf, enough: float = math.inf,
    ) -> Iterator[Message]:  # fmt: skip
        """Send the messages, then yield replies as they arrive, until the `RoundDeadline`.

        Nodes that have not replied by then are asked less often from now on.
        """
        self.outstanding = {}
        if not messages:
            return
        # A calibration counts as training.
        self._kind = messages[0].metadata.message_type.partition(".")[0]
        self.send(grid, messages)
        clients = [sent.client for sent in self.outstanding.values()]
        self.deadline = RoundDeadline(timeout, len(clients), least, grace, enough, clock_of(grid))
        failed = failures_of(grid).count
        late = {message_id: node for node in self._nodes.values() for message_id in node.late}
        for reply in pull_replies(
            grid, self._message_builder.inbox, self._in_order(), self.deadline, late.keys()
        ):
            answered = reply.metadata.reply_to_message_id
            if answered in self.outstanding:
                yield reply
            elif answered in late:
                self._refuse_late(reply, late.pop(answered))
            failed = failures_of(grid).count
        # If the SuperLink failed after the last reply, missing replies are not the nodes' fault.
        failure = failures_of(grid).last if failures_of(grid).count > failed else ""
        # In one process a client runs only when its reply is fetched: there are no late replies.
        self._close(failure, look_for_late=not in_process(grid))

    def valid(
        self, replies: Iterable[Message], read: Callable[[Message, Sent], Checked]
    ) -> Iterator[tuple[Sent, Checked]]:
        """Yield what `read` makes of each reply; reject a reply for which it raises ValueError."""
        for message in replies:
            sent = self.outstanding.pop(message.metadata.reply_to_message_id)
            node = self._nodes[sent.client.node_id]
            self._round_log.count(array_bytes(message), sent.size)
            try:
                checked = read(message, sent)
            except ValueError as error:
                self.reject(sent.client, error)
                continue
            self.deadline.use()
            node.answered(self._kind)
            node.has_fixed = self._message_builder.fixed is not None  # it has them now
            yield sent, checked
            del checked  # an update may be as large as the model

    def expect(self, message: Message, client: RegisteredClient, now: float = 0.0) -> None:
        """Add a sent message to the outstanding ones."""
        sent = Sent(client, self._round_log.number, array_bytes(message), now)
        self.outstanding[message.metadata.message_id] = sent

    def reject(self, client: RegisteredClient, reason: object) -> None:
        """Record a rejected reply with its reason."""
        node = self._nodes[client.node_id]
        node.has_fixed = False  # it may have forgotten what it was sent
        node.faults += 1
        self._round_log.reject(client, reason)

    def send(self, grid: Grid, messages: list[Message]) -> None:
        """Push the messages; reject the clients whose message the SuperLink does not take."""
        pushed = {id(message) for message in push(grid, messages)}
        for message in messages:
            client = self._nodes[message.metadata.dst_node_id].client
            assert client is not None  # messages are written only to clients
            if id(message) in pushed:
                self.expect(message, client, clock_of(grid).now)
            else:
                self.reject(client, "the message could not be sent")

    def _in_order(self) -> list[str]:
        """Return the outstanding messages; nodes with missed or rejected replies come last."""

        def failures(message_id: str) -> int:
            return self._nodes[self.outstanding[message_id].client.node_id].failures

        return sorted(self.outstanding, key=failures)

    def _close(self, failure: str, *, look_for_late: bool) -> None:
        """Stop waiting, and record each missing reply as unused or as rejected.

        Replies are unused if enough others came. If the SuperLink failed, the reply is rejected
        but the node is asked as often as before. Otherwise the node has missed a reply.
        """
        seconds, number = f"{self.deadline.seconds:.4g}", self._round_log.number
        for message_id, sent in self.outstanding.items():
            client = sent.client
            self._round_log.count(0, sent.size)
            if self.deadline.satisfied:
                why = ""
                self._round_log.unused.append(client.partition_id)
            elif failure:
                why = ""
                self._nodes[client.node_id].has_fixed = False  # it may not have got the message
                self._round_log.reject(
                    client, f"no reply within {seconds} s, since the SuperLink failed ({failure})"
                )
            else:
                self.reject(client, f"no reply within {seconds} s")
                self._nodes[client.node_id].note_missed_reply(self._kind, number)
                why = f"late: a reply to round {number}, which closed after {seconds} s"
            if look_for_late:
                self._nodes[client.node_id].expect_late(message_id, client, why)

    def _refuse_late(self, reply: Message, node: Node) -> None:
        """Count a late reply's bytes, and reject it unless it is unused."""
        client, why = node.late.pop(reply.metadata.reply_to_message_id)
        self._round_log.count(array_bytes(reply), 0)
        if why:
            self.reject(client, why)
