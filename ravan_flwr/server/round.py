"""One round: send its messages, wait for the replies, reject what is invalid or late.

A reply is accepted until the wait for it ends, when it is rejected as missing. If it comes later,
a following wait fetches it, and that round's record has it as late: no round waits for it, its
bytes count, and it is rejected once.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from flwr.app import ArrayRecord, ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.messages.arrays import FIXED, array_bytes, to_record
from ravan_flwr.messages.registered_client import RegisteredClient
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.tensors import checksum
from ravan_flwr.server.client_registry import Node
from ravan_flwr.server.round_log import RoundLog
from ravan_flwr.server.runtime import drop_message, in_process
from ravan_flwr.server.superlink_calls import find_failures, push
from ravan_flwr.server.waiting import ReplyFetcher, RoundDeadline, pull_replies
from ravan_flwr.simulated_time.clock import REAL, find_clock
from ravan_flwr.specs import Scalar

Checked = TypeVar("Checked")


class MessageBuilder:
    """Write messages, with the fixed tensors for nodes that lack them. One object serves a run."""

    def __init__(self, nodes: Mapping[int, Node], fixed: Tensors | None) -> None:
        self.nodes = nodes
        # Of the run, for `Round.replies`: its threads may still fetch after a round.
        self.inbox = ReplyFetcher()
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
        message_type: str,
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
        return Message(content, client.node_id, message_type, group_id=str(number))


@dataclass(frozen=True)
class Sent:
    """A message that was sent and has no reply yet."""

    client: RegisteredClient
    number: int  # of the round
    size: int  # in bytes
    time: float  # when it was sent


@dataclass(frozen=True)
class Limits:
    """How many replies a round needs, and how long it waits for more."""

    min_replies: int  # valid replies that the round needs
    quorum: int  # valid replies with which the straggler timeout begins
    grace: float | None  # the straggler timeout; None: automatic
    enough: float = math.inf  # valid replies that end the wait at once
    asks_more: bool = True  # are further clients asked if fewer than `min_replies` came?


class Round:
    """The messages of one round that are under way.

    `limits` are those of the settings, for a wait for all replies. A release may have others.
    """

    def __init__(
        self, config: Config, message_builder: MessageBuilder, log: RoundLog, grid: Grid
    ) -> None:
        self.config, self.log, self.grid, self.number = config, log, grid, log.number
        self._message_builder, self._nodes = message_builder, message_builder.nodes
        # Clients in one process share this machine: none is slower than the others.
        alike = in_process(grid) and find_clock(grid) is REAL
        grace = math.inf if alike else config.straggler_grace
        self.limits = Limits(config.min_replies, config.min_replies, grace)
        self.recipients: set[int] = set()  # ids of the nodes that were sent a message
        self.outstanding: dict[str, Sent] = {}  # by message id
        self.versions: Mapping[int, Tensors] = {}  # earlier states that clients still train
        self.deadline = RoundDeadline(0, 0)
        self._kind = MessageType.TRAIN  # of its messages

    def replies(self, messages: list[Message], limits: Limits | None = None) -> Iterator[Message]:
        """Send the messages, then yield replies as they arrive, until the `RoundDeadline`.

        Nodes that have not replied by then are asked less often from now on.
        """
        self.outstanding = {}
        if not messages:
            return
        # A calibration counts as training.
        self._kind = messages[0].metadata.message_type.partition(".")[0]
        self.send(messages)
        grid, limits = self.grid, limits or self.limits
        self.deadline = RoundDeadline(
            self.config.round_timeout, len(self.outstanding), limits.quorum, limits.grace,
            limits.enough, find_clock(grid),
        )  # fmt: skip
        failures = {
            message_id: self._nodes[sent.client.node_id].failures
            for message_id, sent in self.outstanding.items()
        }
        waiting = sorted(failures, key=failures.__getitem__)  # those with failures come last
        late = self.late_replies()
        failed = find_failures(grid).count
        inbox = self._message_builder.inbox
        for reply in pull_replies(grid, inbox, waiting, self.deadline, late.keys()):
            answered = reply.metadata.reply_to_message_id
            if answered in self.outstanding:
                yield reply
            elif answered in late:
                self.note_late(reply, late.pop(answered))
            failed = find_failures(grid).count
        # If the SuperLink failed after the last reply, missing replies are not the nodes' fault.
        self._close(find_failures(grid).last if find_failures(grid).count > failed else "")

    def send(self, messages: list[Message]) -> None:
        """Push the messages; reject the clients whose message the SuperLink does not take."""
        pushed = {id(message) for message in push(self.grid, messages)}
        for message in messages:
            self.recipients.add(message.metadata.dst_node_id)
            client = self._nodes[message.metadata.dst_node_id].client
            assert client is not None  # messages are written only to clients
            if id(message) in pushed:
                self.expect(message, client, find_clock(self.grid).now)
            else:
                self.reject(client, "the message could not be sent")

    def expect(self, message: Message, client: RegisteredClient, now: float = 0.0) -> None:
        """Add a sent message to the outstanding ones."""
        sent = Sent(client, self.number, array_bytes(message), now)
        self.outstanding[message.metadata.message_id] = sent

    def valid(
        self, replies: Iterable[Message], read: Callable[[Message, Sent], Checked]
    ) -> Iterator[tuple[Sent, Checked]]:
        """Yield what `read` makes of each reply; reject a reply for which it raises ValueError."""
        for message in replies:
            sent = self.outstanding.pop(message.metadata.reply_to_message_id)
            node = self._nodes[sent.client.node_id]
            self.log.count_bytes(array_bytes(message), sent.size)
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

    def reject(self, client: RegisteredClient, reason: object) -> None:
        """Record a rejected reply with its reason."""
        node = self._nodes[client.node_id]
        node.has_fixed = False  # it may have forgotten what it was sent
        node.faults += 1
        self.log.reject(client, reason)

    def late_replies(self) -> dict[str, Node]:
        """Return the nodes whose late replies may still come, by message id."""
        return {message_id: node for node in self._nodes.values() for message_id in node.late}

    def note_late(self, reply: Message, node: Node) -> None:
        """Count a late reply's bytes, and record it as late unless it is unused.

        It was rejected, and the node had its fault, when the reply was missing.
        """
        client, reason = node.late.pop(reply.metadata.reply_to_message_id)
        self.log.count_bytes(array_bytes(reply), 0)
        if reason:
            self.log.note_late(client, reason)

    def _close(self, failure: str) -> None:
        """Stop waiting, and record each missing reply as unused or as rejected.

        Replies are unused if enough others came. If the SuperLink failed, the reply is rejected
        but the node is asked as often as before. Otherwise the node has missed a reply.
        """
        seconds = f"{self.deadline.seconds:.4g}"
        for message_id, sent in self.outstanding.items():
            client, node, reason = sent.client, self._nodes[sent.client.node_id], ""
            self.log.count_bytes(0, sent.size)
            if self.deadline.satisfied:
                self.log.unused.append(client.partition_id)
            elif failure:
                node.has_fixed = False  # it may not have got the message
                self.log.reject(
                    client, f"no reply within {seconds} s, since the SuperLink failed ({failure})"
                )
            else:
                self.reject(client, f"no reply within {seconds} s")
                node.note_missed_reply(self._kind, self.number)
                reason = f"late: a reply to round {self.number}, which closed after {seconds} s"
            # In one process a client runs only when its reply is fetched: none is late.
            if in_process(self.grid):
                drop_message(self.grid, message_id)
            else:
                node.expect_late(message_id, client, reason)
