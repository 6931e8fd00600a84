"""Query each node once when it connects, or comes back; valid nodes become clients.

The run begins when the nodes have answered. Nobody waits for a node that comes later, or comes
back: it takes part from the round after its answer.

Members must fit to each other: they have the server's app, and parts of the data that nobody else
has (partitions.py).
"""

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from hashlib import sha256
from logging import getLogger

import torch
from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.config.run_config import Config
from ravan_flwr.flower_private import NodeInfo
from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.plain_text import listed
from ravan_flwr.messages.registered_client import (
    RegisteredClient,
    check_same_app,
    read_registered_client,
)
from ravan_flwr.methods.tensors import Tensors
from ravan_flwr.runs.console import count
from ravan_flwr.server.partitions import Partitions
from ravan_flwr.server.replies import as_value_error, content_of
from ravan_flwr.server.reply_fetcher import ReplyFetcher, in_process, push, simulating
from ravan_flwr.specs import NODES_CHOSEN
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)

FLOWERS_NODES = 2  # of a simulation whose federation config says no number
NODES_TIMEOUT = 60.0  # seconds to wait for the first node
REGISTRY_TIMEOUT = 20.0  # seconds to wait for the rest, from the last that came
AT_ONCE = 64  # questions that are open in Flower's simulation, which looks at all of them often
REFUSALS_TOLD = 5  # by a line each, of one recruiting
CATCH_UP = 60.0  # seconds for the answers of nodes that come when the result is delivered
MOST_LATE = 2  # replies of one node that are looked for after their round has closed
MISSED = "registry/missed"  # in a checkpoint: who has missed replies, and until when it is skipped
KINDS = (MessageType.TRAIN, MessageType.EVALUATE)  # of messages whose replies are missed
QUERY_TIMEOUT = 1800.0  # seconds for an answer: a node loads its model and data first


@dataclass
class Node:
    """Keep the record of one node."""

    node_id: int
    since: str | None = None  # since when it was there as it was asked; None: it is to be asked
    question: str = ""  # the message that its answer is waited for; "" if none is
    until: float = 0.0  # for how long
    last: str = ""  # the message that it was asked by the last time
    times: int = 0  # how often it was asked
    client: RegisteredClient | None = None
    refused: str = ""  # why
    # By kind of message, since who answers one kind alone would be asked for the other for ever:
    missed_replies: dict[str, int] = field(default_factory=dict)  # how many in a row had no reply
    skipped_until: dict[str, int] = field(default_factory=dict)  # first round in which it is asked
    has_fixed: bool = False  # it has the fixed tensors, if there are some
    faults: int = 0  # how many of its replies in a row were no good
    disputes: set[int] = field(default_factory=set)  # partitions: one of both is at fault
    # By message, the oldest first: who is late with a reply, and why it will be refused; "" if it
    # was spare.
    late: dict[str, tuple[RegisteredClient, str]] = field(default_factory=dict)
    heard: float = 0.0  # when it last sent something, in seconds since 1970

    @property
    def failures(self) -> int:
        """Count missed replies and faults; replies of nodes with the fewest are read first."""
        return sum(self.missed_replies.values()) + self.faults

    def note_missed_reply(self, kind: str, round_number: int) -> None:
        """Ask it less often: after k missed replies in a row, not for 2^(k-1) - 1 rounds."""
        self.missed_replies[kind] = self.missed_replies.get(kind, 0) + 1
        self.skipped_until[kind] = round_number + 2 ** min(self.missed_replies[kind] - 1, 6)

    def answered(self, kind: str) -> None:
        """Note that it replied: from now on it may be asked for this in every round."""
        self.missed_replies.pop(kind, None)
        self.skipped_until.pop(kind, None)
        self.faults = 0

    def expect_late(self, message_id: str, client: RegisteredClient, why: str) -> None:
        """Look for a late reply in the rounds that follow; for the last few only."""
        if len(self.late) == MOST_LATE:
            del self.late[next(iter(self.late))]
        self.late[message_id] = client, why

    def is_skipped(self, kind: str, round_number: int) -> bool:
        """Return whether it is skipped in a round; a node that does not train does not evaluate."""
        if not self.skipped_until:  # as nearly all
            return False
        return any(
            self.skipped_until.get(task, 0) > round_number for task in (kind, MessageType.TRAIN)
        )


class ClientRegistry:
    """Keep a record of every node, by node id: the clients so far, and those that were refused.

    Every client has this server's code, and the fingerprints of `loaded`, the server's model and
    data. `parts` is in how many a resumed run shared its data. A run does not begin with fewer than
    `min-replies` clients while others may still come. Without `for_training` one is enough, and it
    does not matter into how many parts a node divides the data.
    """

    def __init__(
        self,
        config: Config,
        loaded: ModelAndData,
        parts: int | None = None,
        *,
        for_training: bool = True,
    ) -> None:
        self.config, self.code = config, code_fingerprint()
        self.backbone, self.derived = loaded.backbone_fingerprint, loaded.model.seed_fingerprint
        self.least = config.min_replies if for_training else 1
        self.nodes: dict[int, Node] = {}
        # Numbers of examples are checked where they count.
        counted = config.weighting == "examples" or config.evaluate_on == "clients"
        sizes = loaded.partition_sizes if counted else None
        self._parts = Partitions(parts, sizes, config.max_examples)
        self._keys: dict[int, str] = {}  # node id -> fingerprint of its key, where it keeps one
        self._for_training = for_training
        self._inbox = ReplyFetcher()
        self._settled: object = None  # the list of nodes with which all had answered
        self._checked: Mapping[int, RegisteredClient] | None = None  # those that fit to each other
        self._unasked = 0  # nodes that are here and will be asked when others have answered
        self._refused_now: list[str] = []  # the reasons of this recruiting
        self.on_answer: Callable[[], None] | None = None  # called when nodes have answered

    # Kept until a client changes, so that a round costs next to nothing for who is not in it.

    @cached_property
    def clients(self) -> Mapping[int, RegisteredClient]:
        """Return the nodes that can take part, by node id; another mapping when one has changed."""
        return {n.node_id: n.client for n in self.nodes.values() if n.client is not None}

    @cached_property
    def _by_partition(self) -> list[RegisteredClient]:
        return sorted(self.clients.values(), key=lambda client: client.partition_id)

    @cached_property
    def _most_examples(self) -> int:
        return self._parts.most_examples(self.clients.values())

    @property
    def refused(self) -> dict[int, str]:
        """Return why each of the others cannot take part."""
        return {node.node_id: node.refused for node in self.nodes.values() if node.refused}

    @property
    def owners(self) -> dict[int, str]:
        """Return the keys of the nodes that hold the partitions, as far as they keep a key."""
        return self._parts.owners

    @property
    def partitions(self) -> int:
        """Return in how many parts the data is shared."""
        return self._parts.number(self.clients.values())

    def examples(self, client: RegisteredClient) -> int:
        """Return by how many examples a client is weighted."""
        return self._parts.examples(client, self._most_examples)

    def present(self, grid: Grid) -> list[RegisteredClient]:
        """Return the clients that are connected now and have no open question, by partition."""
        present, nodes = set(grid.get_node_ids()), self.nodes
        return [
            client
            for client in self._by_partition
            if client.node_id in present and not nodes[client.node_id].question
        ]

    def without_skipped(
        self, clients: Sequence[RegisteredClient], kind: str, round_number: int, least: int = 1
    ) -> list[RegisteredClient]:
        """Drop the clients that are skipped in this round; keep all where too few are left."""
        available = [m for m in clients if not self.nodes[m.node_id].is_skipped(kind, round_number)]
        return available if len(available) >= max(least, self.least) else list(clients)

    @property
    def memory(self) -> Tensors:
        """Return what a simulated run needs to skip whom it would have skipped."""
        rows = [
            (node.client.partition_id, KINDS.index(kind), missed, node.skipped_until[kind])
            for node in self.nodes.values() if node.client is not None
            for kind, missed in node.missed_replies.items()
        ]  # fmt: skip
        return {MISSED: torch.tensor(rows)} if rows else {}

    def restore(self, memory: Mapping[str, torch.Tensor]) -> None:
        """Take back what `memory` returned before the run was stopped."""
        nodes = {client.partition_id: self.nodes[client.node_id] for client in self._by_partition}
        for partition, number, missed, until in memory.get(MISSED, torch.empty(0)).tolist():
            nodes[partition].missed_replies[KINDS[number]] = missed
            nodes[partition].skipped_until[KINDS[number]] = until

    # Recruiting.

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Query the nodes that are new, take the answers that came; at the start, wait for both."""
        self.gather(grid, wait=wait)
        if not self.clients:
            why, number = "none is connected", len(self.refused)
            if number:
                all_were = "the one that is connected was" if number == 1 else f"all {number} were"
                why = f"{all_were} refused: {listed(self.refused.values())}"
            else:
                why += ". Expected at least one that can train; start SuperNodes"
            raise RuntimeError(f"no node to train on: {why}")
        if wait:
            chosen = in_process(grid) or NODES_CHOSEN in os.environ
            self._introduce(advise=simulating(grid) and not chosen)
            self._parts.check(self.clients.values(), self.least)

    def gather(self, grid: Grid, *, wait: bool = False) -> None:
        """Do as `recruit` does, and leave it to the caller whether there is anybody."""
        if not wait and grid.get_nodes() is self._settled:
            return  # the list is the same, and all in it have answered
        self._query(grid, wait=wait)
        self._check_all()
        if reasons := self._refused_now[REFUSALS_TOLD:]:  # the others have a line each
            log.warning("refused %s more: %s", count(len(reasons), "node"), listed(reasons))
        self._refused_now.clear()

    def catch_up(self, grid: Grid) -> None:
        """Wait, not for long, for nodes that came, or came back, and have not answered yet."""
        until = time.monotonic() + CATCH_UP
        self.gather(grid)
        while time.monotonic() < until and any(
            self.nodes[n].question for n in grid.get_node_ids() if n in self.nodes
        ):
            time.sleep(0.5)
            self.gather(grid)

    def _query(self, grid: Grid, *, wait: bool) -> None:
        """Ask and take answers, once, or until all are there or the time is up."""
        deadline = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        pause = 0.05
        while True:
            nodes = grid.get_nodes()
            self._ask(grid, nodes)
            if self._take_answers(grid) and wait:
                deadline, pause = time.monotonic() + REGISTRY_TIMEOUT, 0.05
            # A node that dies whenever it is asked, and comes back, is not waited for again.
            waiting = any(n.question and n.times == 1 for n in self.nodes.values())
            waiting = wait and (waiting or self._unasked > 0)
            awaited = max(self._parts.awaited(self.clients.values()), self.least)
            all_here = len(self.clients) + len(self.refused) >= awaited
            if not waiting and (all_here or time.monotonic() >= deadline):
                open_ones = self._unasked or any(node.question for node in self.nodes.values())
                self._settled = None if open_ones else nodes
                return
            time.sleep(pause)
            pause = min(1.2 * pause, 0.5)

    def _ask(self, grid: Grid, infos: Iterable[NodeInfo]) -> None:
        """Query the nodes that are new, and those that were away: they may have changed."""
        nodes = list(infos)
        since = {node.node_id: node.last_activated_at for node in nodes}
        if not simulating(grid):
            key_holders = [node for node in nodes if node.public_key]
            self._keys |= {n.node_id: sha256(n.public_key).hexdigest()[:32] for n in key_holders}
        for node_id in since:
            if node_id not in self.nodes:
                self.nodes[node_id] = Node(node_id)
        for node in self.nodes.values():
            if node.since is not None and since.get(node.node_id) != node.since:
                node.since, node.refused, node.question = None, "", ""  # it is asked again
        # A reply that never comes whole keeps a thread: a node has one open question at a time.
        new = [
            node_id
            for node_id in since
            if self.nodes[node_id].since is None and not self._inbox.holds(self.nodes[node_id].last)
        ]
        self._unasked = 0
        if simulating(grid) and not in_process(grid):
            room = max(0, AT_ONCE - sum(1 for node in self.nodes.values() if node.question))
            new, self._unasked = new[:room], len(new[room:])
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in new]
        until = time.monotonic() + QUERY_TIMEOUT
        for message in push(grid, messages) if messages else ():
            node = self.nodes[message.metadata.dst_node_id]
            node.question = node.last = message.metadata.message_id
            node.since, node.until = since[node.node_id], until
            node.times += 1

    def _take_answers(self, grid: Grid) -> bool:
        """Take the answers that came; return whether one is the first of its node."""
        first = False
        questions = {node.question: node for node in self.nodes.values() if node.question}
        for reply in self._inbox.look(grid, list(questions)):
            node = questions.get(reply.metadata.reply_to_message_id)
            if node is None or node.question != reply.metadata.reply_to_message_id:
                continue  # it came back since then, and was asked anew
            node.question = ""
            self._take_answer(node, reply)
            first = first or node.times == 1
            if self.on_answer is not None:
                self.on_answer()
        for node in self.nodes.values():
            if node.question and time.monotonic() >= node.until:
                node.question = ""
                self._refuse(node, f"no answer within {QUERY_TIMEOUT:g} s")
        return first

    def _take_answer(self, node: Node, reply: Message) -> None:
        """Make a node a client if its answer is valid and it runs the same app; else refuse it."""
        node.heard = time.time()
        try:
            with as_value_error():
                answers = content_of(reply).config_records
                answer = answers.get("client", ConfigRecord())
                client = read_registered_client(node.node_id, answer, len(self.derived))
                check_same_app(client, self.code, self.backbone, self.derived)
        except ValueError as error:
            self._refuse(node, str(error))
        else:
            # Put it last in the dict: the order of nodes is that of their answers.
            self.nodes[node.node_id] = self.nodes.pop(node.node_id)
            fraction = min(client.budget_fraction, self.config.max_share)
            self._note(node, replace(client, budget_fraction=fraction), "")

    # Checks that compare clients.

    def _check_all(self) -> None:
        """Refuse clients that do not fit to the others, or claim what they do not have."""
        clients = self.clients
        if self._checked is clients:
            return  # nobody has come or gone since
        if self._for_training:
            self._refuse_all(self._parts.misfits(self.clients.values()))
            self._refuse_all(self._parts.miscounts(self.clients.values()))
        # At last: a node that was refused before this holds no part of the data.
        keys = self._keys
        self._parts.forget_strangers([keys[k] for k in self.clients if k in keys])
        claims = {k: self._parts.claim(m, keys.get(k, "")) for k, m in self.clients.items()}
        self._refuse_all(claims)
        self._checked = clients

    def _refuse_all(self, reasons: Mapping[int, str]) -> None:
        for node_id, reason in reasons.items():
            if reason:
                self._refuse(self.nodes[node_id], reason)

    def _refuse(self, node: Node, reason: str) -> None:
        self._note(node, None, reason)
        self._refused_now.append(reason)
        if len(self._refused_now) <= REFUSALS_TOLD:
            log.warning("refused node %d: %s", node.node_id, reason)

    def _note(self, node: Node, client: RegisteredClient | None, refused: str) -> None:
        """Note that a node is a client now, or why it is none."""
        node.client, node.refused = client, refused
        for name in ("clients", "_by_partition", "_most_examples"):
            vars(self).pop(name, None)

    def _introduce(self, *, advise: bool) -> None:
        """Log who is there, and how many parts of the data have no node.

        And how to simulate as many clients as the preset is made for, if Flower chose fewer.
        """
        clients = self.clients.values()
        fractions = sorted({m.budget_fraction for m in clients})
        log.info(
            "%s with %s, budgets %s, on %s",
            count(len(clients), "node"), count(sum(m.examples for m in clients), "example"),
            listed((f"{s:g}" for s in fractions), 20, ", "),
            listed(sorted({m.device for m in clients}), 20, ", "),
        )  # fmt: skip
        if (missing := self.partitions - len(clients)) > 0:
            log.warning("%s without a node: their data is not used", count(missing, "partition"))
        shared = [client for client in clients if not client.own_data]
        meant = self.config.num_clients or 0
        if advise and len(shared) == len(self.clients) == FLOWERS_NODES < meant:
            log.info(
                "the preset is made for %d clients; to simulate as many: flwr run . --stream "
                '--federation-config "num-supernodes=%d client-resources-num-cpus=1"',
                meant, meant,
            )  # fmt: skip
