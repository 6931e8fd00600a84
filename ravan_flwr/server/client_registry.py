"""Query each node when it connects or reconnects; nodes with a valid answer become clients.

The run begins when the nodes have answered. It does not wait for nodes that connect or reconnect
later: they take part from the round after their answer.

Clients must be consistent: each has the server's app, and a partition that no other client has
(partitions.py).
"""

import time
from collections.abc import Iterable, Mapping, Sequence
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
from ravan_flwr.messages.plain_text import listed, plain
from ravan_flwr.messages.registered_client import (
    RegisteredClient,
    check_same_code,
    check_same_model,
    partition_in,
    read_registered_client,
)
from ravan_flwr.methods.tensors import Tensors
from ravan_flwr.runs.console import count
from ravan_flwr.server.partitions import Partitions
from ravan_flwr.server.runtime import in_process, simulating
from ravan_flwr.server.superlink_calls import push
from ravan_flwr.server.update import as_value_error, read_content
from ravan_flwr.server.waiting import ReplyFetcher
from ravan_flwr.training.model_and_data import ModelAndData

log = getLogger(__name__)

NODES_TIMEOUT = 60.0  # seconds to wait for the first node
REGISTRY_TIMEOUT = 20.0  # seconds to wait for further nodes, from the last answer
AT_ONCE = 64  # open queries in Flower's simulation, which polls all open messages often
REFUSALS_LOGGED = 5  # refused nodes with a log line each, per recruiting
CATCH_UP = 60.0  # seconds for the answers of nodes that connect when the result is delivered
MAX_LATE = 2  # late replies per node that are fetched after their round has closed
MISSED = "registry/missed"  # in a checkpoint: missed replies of each node, and when its skip ends
FIXED_SENT = "registry/fixed-sent"  # partitions that have the fixed tensors
MESSAGE_TYPES = (MessageType.TRAIN, MessageType.EVALUATE)  # of messages whose replies are missed
QUERY_TIMEOUT = 1800.0  # seconds for an answer: a node loads its model and data first


@dataclass
class Node:
    """A node's record."""

    node_id: int
    activated_at: str | None = None  # its last activation when queried; None: not queried yet
    open_query: str = ""  # id of the query without an answer; "" if there is none
    query_expires: float = 0.0  # when the wait for that answer ends, in monotonic seconds
    last_query: str = ""  # id of the last query
    num_queries: int = 0
    client: RegisteredClient | None = None
    partition: int | None = None  # as it says, also if it is refused; None: not known
    refused: str = ""  # the reason
    # By type of message: a node that answers only one type must be skipped for the other.
    missed_replies: dict[str, int] = field(default_factory=dict)  # in a row
    skipped_until: dict[str, int] = field(default_factory=dict)  # first round in which it is asked
    has_fixed: bool = False  # it has the fixed tensors, if there are some
    faults: int = 0  # rejected replies in a row
    disputes: set[int] = field(default_factory=set)  # partitions: one of both is at fault
    # Late replies by message id, the oldest first: the client, and why the reply is late ("" if it
    # is unused).
    late: dict[str, tuple[RegisteredClient, str]] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Return the partition that the node says it has, or else its id, of up to 20 digits."""
        return f"node {self.node_id}" if self.partition is None else f"partition {self.partition}"

    @property
    def failures(self) -> int:
        """Return missed replies plus faults; replies of nodes with the fewest are read first."""
        return sum(self.missed_replies.values()) + self.faults

    def note_missed_reply(self, message_type: str, round_number: int) -> None:
        """Skip the node for 2^(k-1) - 1 rounds after k missed replies in a row (k at most 7)."""
        self.missed_replies[message_type] = self.missed_replies.get(message_type, 0) + 1
        self.skipped_until[message_type] = round_number + 2 ** min(
            self.missed_replies[message_type] - 1, 6
        )

    def answered(self, message_type: str) -> None:
        """Note a valid reply: the node may be asked for this kind in every round again."""
        self.missed_replies.pop(message_type, None)
        self.skipped_until.pop(message_type, None)
        self.faults = 0

    def expect_late(self, message_id: str, client: RegisteredClient, why: str) -> None:
        """Fetch a late reply in later rounds; keep at most `MAX_LATE` such messages."""
        if len(self.late) == MAX_LATE:
            del self.late[next(iter(self.late))]
        self.late[message_id] = client, why

    def is_skipped(self, message_type: str, round_number: int) -> bool:
        """Return whether the node is skipped; if it is skipped in training, also in evaluation."""
        if not self.skipped_until:  # true of most nodes
            return False
        return any(
            self.skipped_until.get(task, 0) > round_number
            for task in (message_type, MessageType.TRAIN)
        )


class ClientRegistry:
    """Keep the records of all nodes, by node id: clients, and nodes that were refused.

    Every client has the server's code and the fingerprints of `loaded`, the server's model and
    data. A run does not begin with fewer than `min-replies` clients while others may still connect.

    Args:
        config: The run's configuration.
        loaded: The server's model and data.
        num_partitions: The number of partitions of a resumed run; None in a new run.
        for_training: If False, one client is enough, and numbers of partitions are not compared.
    """

    def __init__(
        self,
        config: Config,
        loaded: ModelAndData,
        num_partitions: int | None = None,
        *,
        for_training: bool = True,
    ) -> None:
        self.config, self.code = config, code_fingerprint()
        self.backbone, self.fingerprint = loaded.backbone_fingerprint, loaded.model.seed_fingerprint
        self.min_clients = config.min_replies if for_training else 1
        self.nodes: dict[int, Node] = {}
        # Numbers of examples are checked if they are used: as weights, or for numbers of steps.
        weighted = config.weighting == "examples" or config.evaluate_on == "clients"
        counted = weighted or config.local_epochs is not None
        sizes = loaded.partition_sizes if counted else None
        self._partitions = Partitions(num_partitions, sizes, config.max_examples)
        self._keys: dict[int, str] = {}  # node id -> hash of its public key, if it has one
        self._for_training = for_training
        self._inbox = ReplyFetcher()
        self._settled: object = None  # the grid's list of nodes of which all have answered
        self._checked: Mapping[int, RegisteredClient] | None = None  # clients compared already
        self._unasked = 0  # connected nodes that are queried after other answers
        self._refused_now: list[str] = []  # reasons, of this recruiting

    # Cached until a client changes, so that a round costs almost nothing for clients not in it.

    @cached_property
    def clients(self) -> Mapping[int, RegisteredClient]:
        """Return the clients by node id; a new mapping whenever a client has changed."""
        return {n.node_id: n.client for n in self.nodes.values() if n.client is not None}

    @cached_property
    def _by_partition(self) -> list[RegisteredClient]:
        return sorted(self.clients.values(), key=lambda client: client.partition_id)

    @cached_property
    def _max_examples(self) -> int:
        return self._partitions.max_examples(self.clients.values())

    @property
    def refused(self) -> dict[int, str]:
        """Return the reasons of the refused nodes, by node id."""
        return {node.node_id: node.refused for node in self.nodes.values() if node.refused}

    @property
    def owners(self) -> dict[int, str]:
        """Return the key hashes of the nodes that hold the partitions, if they have keys."""
        return self._partitions.owners

    @property
    def partitions(self) -> int:
        """Return the number of partitions."""
        return self._partitions.number(self.clients.values())

    def examples(self, client: RegisteredClient) -> int:
        """Return a client's weight in examples."""
        return self._partitions.examples(client, self._max_examples)

    def present(self, grid: Grid) -> list[RegisteredClient]:
        """Return the connected clients without an open query, sorted by partition."""
        present, nodes = set(grid.get_node_ids()), self.nodes
        return [
            client
            for client in self._by_partition
            if client.node_id in present and not nodes[client.node_id].open_query
        ]

    def without_skipped(
        self,
        clients: Sequence[RegisteredClient],
        message_type: str,
        round_number: int,
        min_clients: int = 1,
    ) -> list[RegisteredClient]:
        """Return the clients that are not skipped in this round; all, if too few would be left."""
        available = [
            client
            for client in clients
            if not self.nodes[client.node_id].is_skipped(message_type, round_number)
        ]
        return available if len(available) >= max(min_clients, self.min_clients) else list(clients)

    @property
    def memory(self) -> Tensors:
        """Return what a run in process needs to send the same messages after a resume."""
        rows = [
            (
                node.client.partition_id, MESSAGE_TYPES.index(message_type), missed,
                node.skipped_until[message_type],
            )
            for node in self.nodes.values() if node.client is not None
            for message_type, missed in node.missed_replies.items()
        ]  # fmt: skip
        partitions = [
            node.client.partition_id for node in self.nodes.values()
            if node.client is not None and node.has_fixed
        ]  # fmt: skip
        found = {MISSED: rows, FIXED_SENT: partitions}
        return {name: torch.tensor(numbers) for name, numbers in found.items() if numbers}

    def restore(self, memory: Mapping[str, torch.Tensor]) -> list[int]:
        """Restore what `memory` returned; return the partitions that have the fixed tensors."""
        nodes = {client.partition_id: self.nodes[client.node_id] for client in self._by_partition}
        for partition, number, missed, until in memory.get(MISSED, torch.empty(0)).tolist():
            nodes[partition].missed_replies[MESSAGE_TYPES[number]] = missed
            nodes[partition].skipped_until[MESSAGE_TYPES[number]] = until
        fixed_sent: list[int] = memory.get(FIXED_SENT, torch.empty(0)).tolist()
        for partition in fixed_sent:
            nodes[partition].has_fixed = True
        return fixed_sent

    # Recruiting.

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Query new nodes and take answers; raise RuntimeError if there is no client.

        With `wait`, wait for nodes and answers, and raise ValueError if partitions are wrong.
        """
        self.gather(grid, wait=wait)
        self.require_clients()
        if wait:
            self._log_clients()
            self._partitions.check(self.clients.values(), self.min_clients)

    def require_clients(self) -> None:
        """Raise RuntimeError if there is no client, with the reasons of refused nodes."""
        if not self.clients:
            why = "none is connected. Expected at least one that can train; start SuperNodes"
            if number := len(self.refused):
                why = f"all {number} were refused: {listed(self.refused.values())}"
            raise RuntimeError(f"no node to train on: {why}")

    def gather(self, grid: Grid, *, wait: bool = False) -> None:
        """Query new nodes and take answers, as `recruit` does, but allow that no client exists."""
        if not wait and grid.get_nodes() is self._settled:
            return  # the list is the same, and all in it have answered
        self._query(grid, wait=wait)
        self._check_all()
        if reasons := self._refused_now[REFUSALS_LOGGED:]:  # the first ones have a line each
            log.warning("refused %s more: %s", count(len(reasons), "node"), listed(reasons))
        self._refused_now.clear()

    def catch_up(self, grid: Grid) -> None:
        """Wait up to `CATCH_UP` seconds for nodes that have not answered since they connected."""
        until = time.monotonic() + CATCH_UP
        self.gather(grid)
        while time.monotonic() < until and any(
            self.nodes[n].open_query for n in grid.get_node_ids() if n in self.nodes
        ):
            time.sleep(0.5)
            self.gather(grid)

    def _query(self, grid: Grid, *, wait: bool) -> None:
        """Query nodes and take answers, once; with `wait`, until all answered or time is up."""
        deadline = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        pause = 0.05
        while True:
            nodes = grid.get_nodes()
            self._ask(grid, nodes)
            if self._take_answers(grid) and wait:
                deadline, pause = time.monotonic() + REGISTRY_TIMEOUT, 0.05
            # A node that crashes at each query, and reconnects, is not waited for again.
            waiting = any(n.open_query and n.num_queries == 1 for n in self.nodes.values())
            waiting = wait and (waiting or self._unasked > 0)
            awaited = max(self._partitions.awaited(self.clients.values()), self.min_clients)
            all_here = len(self.clients) + len(self.refused) >= awaited
            if not waiting and (all_here or time.monotonic() >= deadline):
                open_ones = self._unasked or any(node.open_query for node in self.nodes.values())
                self._settled = None if open_ones else nodes
                return
            time.sleep(pause)
            pause = min(1.2 * pause, 0.5)

    def _ask(self, grid: Grid, infos: Iterable[NodeInfo]) -> None:
        """Query nodes that are new or have reconnected: the latter may have changed."""
        nodes = list(infos)
        since = {node.node_id: node.last_activated_at for node in nodes}
        if not simulating(grid):
            key_holders = [node for node in nodes if node.public_key]
            self._keys |= {n.node_id: sha256(n.public_key).hexdigest()[:32] for n in key_holders}
        for node_id in since:
            if node_id not in self.nodes:
                self.nodes[node_id] = Node(node_id)
        for node in self.nodes.values():
            if node.activated_at is not None and since.get(node.node_id) != node.activated_at:
                node.activated_at, node.refused, node.open_query = None, "", ""  # queried again
        # An incomplete reply occupies a thread, so a node has one open query at a time.
        new = [
            node_id
            for node_id in since
            if self.nodes[node_id].activated_at is None
            and not self._inbox.is_fetching(self.nodes[node_id].last_query)
        ]
        self._unasked = 0
        if simulating(grid) and not in_process(grid):
            room = max(0, AT_ONCE - sum(1 for node in self.nodes.values() if node.open_query))
            new, self._unasked = new[:room], len(new[room:])
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in new]
        until = time.monotonic() + QUERY_TIMEOUT
        for message in push(grid, messages) if messages else ():
            node = self.nodes[message.metadata.dst_node_id]
            node.open_query = node.last_query = message.metadata.message_id
            node.activated_at, node.query_expires = since[node.node_id], until
            node.num_queries += 1

    def _take_answers(self, grid: Grid) -> bool:
        """Take the answers that arrived; return whether one is the first of its node."""
        first = False
        open_queries = {node.open_query: node for node in self.nodes.values() if node.open_query}
        for reply in self._inbox.fetch_ready(grid, list(open_queries)):
            node = open_queries.get(reply.metadata.reply_to_message_id)
            if node is None or node.open_query != reply.metadata.reply_to_message_id:
                continue  # the node has reconnected and was queried again
            node.open_query = ""
            self._take_answer(node, reply)
            first = first or node.num_queries == 1
        for node in self.nodes.values():
            if node.open_query and time.monotonic() >= node.query_expires:
                node.open_query = ""
                self._refuse(node, f"no answer within {QUERY_TIMEOUT:g} s")
        return first

    def _take_answer(self, node: Node, reply: Message) -> None:
        """Register a node as a client if its answer is valid and it has the same app."""
        try:
            with as_value_error():
                answers = read_content(reply).config_records
                refused = answers.get("refused")
                answer = refused or answers.get("client", ConfigRecord())
                node.partition = partition_in(answer)
                if refused is not None:
                    raise ValueError(plain(str(refused.get("reason") or "it gives no reason")))
                if isinstance(code := answer.get("code"), str):
                    check_same_code(code, self.code)  # another version may have other fields
                client = read_registered_client(node.node_id, answer, len(self.fingerprint))
                check_same_model(client, self.backbone, self.fingerprint)
        except ValueError as error:
            self._refuse(node, str(error))
        else:
            # Move the node to the end: nodes are in the order of their answers.
            self.nodes[node.node_id] = self.nodes.pop(node.node_id)
            fraction = min(client.budget_fraction, self.config.max_share)
            self._note(node, replace(client, budget_fraction=fraction), "")

    # Checks that compare clients.

    def _check_all(self) -> None:
        """Refuse clients whose partition or number of examples is inconsistent."""
        clients = self.clients
        if self._checked is clients:
            return  # no client has changed since
        if self._for_training:
            self._refuse_all(self._partitions.partition_mismatches(self.clients.values()))
            self._refuse_all(self._partitions.example_mismatches(self.clients.values()))
        # This comes last: a node refused above must not hold a partition.
        keys = self._keys
        self._partitions.forget_replaced_keys([keys[k] for k in self.clients if k in keys])
        claims = {k: self._partitions.claim(m, keys.get(k, "")) for k, m in self.clients.items()}
        self._refuse_all(claims)
        self._checked = clients

    def _refuse_all(self, reasons: Mapping[int, str]) -> None:
        for node_id, reason in reasons.items():
            if reason:
                self._refuse(self.nodes[node_id], reason)

    def _refuse(self, node: Node, reason: str) -> None:
        self._note(node, None, reason)
        self._refused_now.append(reason)
        if len(self._refused_now) <= REFUSALS_LOGGED:
            log.warning("refused %s: %s", node.name, reason)

    def _note(self, node: Node, client: RegisteredClient | None, refused: str) -> None:
        """Store a node's client, or the reason of its refusal; drop cached lists of clients."""
        node.client, node.refused = client, refused
        for name in ("clients", "_by_partition", "_max_examples"):
            vars(self).pop(name, None)

    def _log_clients(self) -> None:
        """Log the clients, and how many partitions have no node."""
        clients = self.clients.values()
        fractions = sorted({client.budget_fraction for client in clients})
        log.info(
            "%s with %s, budgets %s, on %s",
            count(len(clients), "node"),
            count(sum(client.examples for client in clients), "example"),
            listed((f"{s:g}" for s in fractions), 20, ", "),
            listed(sorted({client.device for client in clients}), 20, ", "),
        )  # fmt: skip
        if (missing := self.partitions - len(clients)) > 0:
            log.warning("%s without a node: their data is not used", count(missing, "partition"))
