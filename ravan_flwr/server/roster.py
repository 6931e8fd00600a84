"""How the roster fills: nodes are asked the one question when they are first seen, or seen again.

The run begins when they have answered. Nobody waits for a node that comes later, or comes back: it
takes part from the round after its answer.

First come, first served: a part of the data stays with the node that had it first, also while that
one is away or asked again. Nodes with data of their own have no say in how the rest is dealt out.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from logging import getLogger
from statistics import median_low

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.messages.fingerprint import code_fingerprint
from ravan_flwr.messages.member import Member, check_same_app, read_member
from ravan_flwr.server.exchange import Inbox, in_process, push
from ravan_flwr.server.nodes import Node
from ravan_flwr.server.replies import content_of, telling

log = getLogger(__name__)

FLOWERS_NODES = 2  # of a simulation whose federation config says no number
NODES_TIMEOUT = 60.0  # seconds to wait for the first node
ROSTER_TIMEOUT = 20.0  # seconds to wait for the rest, from the last that came
QUERY_TIMEOUT = 1800.0  # seconds for an answer: a node loads its model and data first
MOST_TIMES = 10  # how many times the median a node's own examples count


class Roster:
    """The nodes, by node id: members so far, and those that were refused.

    Every member has this server's code, `backbone` and `derived` fingerprints. `meant` is
    how many clients the preset means, `parts` in how many a run that goes on shared its data, and
    `max_share` the largest budget that the operator grants. A run does not begin with fewer than
    `least` while others may still come.
    """

    def __init__(
        self,
        meant: int,
        backbone: str,
        derived: list[float],
        parts: int | None = None,
        max_share: float = 1.0,
        least: int = 1,
    ) -> None:
        self.meant, self.max_share, self.least = meant, max_share, least
        self.code, self.backbone, self.derived = code_fingerprint(), backbone, derived
        self.nodes: dict[int, Node] = {}
        self._holders: dict[int, int] = {}  # partition id -> the node that had it first
        self._inbox = Inbox()
        self._checked: set[int] = set()  # nodes whose number of examples the server knows
        self._parts_before = parts
        self._parts: int | None = None  # in how many the shared data is dealt out

    @property
    def members(self) -> dict[int, Member]:
        """Who can take part, by node id."""
        return {n.node_id: n.member for n in self.nodes.values() if n.member is not None}

    @property
    def refused(self) -> dict[int, str]:
        """Why each of the others cannot."""
        return {node.node_id: node.refused for node in self.nodes.values() if node.refused}

    def recruit(
        self,
        grid: Grid,
        *,
        wait: bool = False,
        dealt_out: Callable[[int], Sequence[int] | None] | None = None,
    ) -> None:
        """Ask nodes that are new, take the answers that came; at the start, wait for both.

        `dealt_out` knows how many examples each has when so many share the data.
        """
        patience = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        pause = 0.05
        while True:
            self._ask(grid)
            if self._take_answers(grid) and wait:
                patience, pause = time.monotonic() + ROSTER_TIMEOUT, 0.05
            # Whoever dies whenever it is asked, and comes back, is not waited for again.
            waiting = wait and any(n.question and n.times == 1 for n in self.nodes.values())
            if not waiting and (self._all_here or time.monotonic() >= patience):
                break
            time.sleep(pause)
            pause = min(1.2 * pause, 0.5)
        self._agree()
        if dealt_out is not None:
            self._check_examples(dealt_out)
        self._refuse_doubles()  # at last: who is refused has no part of the data
        if not self.members:
            raise RuntimeError(
                f"no node to train on: {listed(self.refused.values()) or 'none is connected'}. "
                "Expected at least one that can train; start SuperNodes"
            )
        if wait:
            self._introduce()
            if not in_process(grid):
                self._advise()

    @property
    def _all_here(self) -> bool:
        """Is nobody missing? A run that goes on needs as many as before, whatever one says."""
        members, meant = self.members, self.partitions
        if self._parts is None and any(not member.own_data for member in members.values()):
            meant = self._parts_before or meant
        return len(members) + len(self.refused) >= max(meant, self.least)

    @property
    def partitions(self) -> int:
        """In how many parts the data is shared: as most nodes have it that share it.

        Where every node has data of its own, as many as most of them say, or as there are.
        """
        members = list(self.members.values())
        if self._parts is not None:
            return self._parts
        dealt_out = [member for member in members if not member.own_data]
        if dealt_out:
            return _agreed(dealt_out)
        return max(_agreed(members), len(members)) if members else 1

    def _introduce(self) -> None:
        """Say who is there."""
        members = self.members.values()
        shares = sorted({m.share for m in members})
        log.info(
            "%d nodes with %d examples, budgets %s, on %s",
            len(members), sum(m.examples for m in members),
            listed((f"{s:g}" for s in shares), 20, ", "),
            listed(sorted({m.device for m in members}), 20, ", "),
        )  # fmt: skip
        if (missing := self.partitions - len(members)) > 0:
            log.warning("%d of the nodes' partitions have no node; they are left out", missing)

    def _advise(self) -> None:
        """Say how to have as many as the preset means, where Flower chose how many there are."""
        shared = [member for member in self.members.values() if not member.own_data]
        if len(shared) == len(self.members) == FLOWERS_NODES < self.meant:
            log.info(
                "the preset means %d clients; a simulation has them with: flwr run . --stream "
                '--federation-config "num-supernodes=%d client-resources-num-cpus=1"',
                self.meant, self.meant,
            )  # fmt: skip

    def _ask(self, grid: Grid) -> None:
        """The nodes that nobody asked, or that were away since then: they may have changed."""
        visits = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
        for node in self.nodes.values():
            if node.since is not None and visits.get(node.node_id) != node.since:
                node.since, node.refused, node.question = None, "", ""
        for node_id in visits:
            self.nodes.setdefault(node_id, Node(node_id))
        # An answer that never comes whole keeps a thread: of one node there is one at a time.
        new = [
            node_id
            for node_id in visits
            if self.nodes[node_id].since is None and not self._inbox.holds(self.nodes[node_id].last)
        ]
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in new]
        until = time.monotonic() + QUERY_TIMEOUT
        for message in push(grid, messages) if messages else ():
            node = self.nodes[message.metadata.dst_node_id]
            node.question = node.last = message.metadata.message_id
            node.until = until
            node.since = visits[node.node_id]
            node.times += 1

    def _take_answers(self, grid: Grid) -> bool:
        """Take those that are there; is one of them the first of its node?"""
        first = False
        asked = {node.question: node for node in self.nodes.values() if node.question}
        for reply in self._inbox.look(grid, list(asked)):
            node = asked.get(reply.metadata.reply_to_message_id)
            if node is None or node.question != reply.metadata.reply_to_message_id:
                continue  # it came back since then, and was asked anew
            node.question = ""
            self._take_answer(node, reply)
            first = first or node.times == 1
        for node in self.nodes.values():
            if node.question and time.monotonic() >= node.until:
                node.question = ""
                self._refuse(node, f"no answer within {QUERY_TIMEOUT:g} s")
        return first

    def _take_answer(self, node: Node, reply: Message) -> None:
        try:
            with telling():
                answers = content_of(reply).config_records
                answer = ConfigRecord() if "member" not in answers else answers["member"]
                member = read_member(node.node_id, answer, len(self.derived))
                check_same_app(member, self.code, self.backbone, self.derived)
        except ValueError as error:
            self._refuse(node, str(error))
        else:
            # Once more at the end of the dict: who came first is who answered first.
            self.nodes[node.node_id] = self.nodes.pop(node.node_id)
            share = min(member.share, self.max_share)
            node.member, node.refused = replace(member, share=share), ""

    def _agree(self) -> None:
        """Refuse whose data is dealt out in another number of parts than most have at the start,
        or than the run had before."""
        dealt_out = [member for member in self.members.values() if not member.own_data]
        if self._parts is None and dealt_out:
            before = self._parts_before
            said = {member.num_partitions for member in dealt_out}
            self._parts = before if before in said else _agreed(dealt_out)
        for member in dealt_out:
            if member.num_partitions != self._parts:
                self._refuse(
                    self.nodes[member.node_id],
                    f"num-partitions is {member.num_partitions}, expected {self._parts} as the "
                    "others have, since the data is dealt out by it; give every SuperNode the same",
                )

    def _refuse_doubles(self) -> None:
        """Refuse whoever has another's part of the data: the first that came keeps it."""
        for member in list(self.members.values()):
            holder = self._holders.setdefault(member.partition_id, member.node_id)
            if holder != member.node_id:
                self._refuse(
                    self.nodes[member.node_id],
                    f"partition-id {member.partition_id} is taken by node {holder}; give every "
                    "SuperNode its own",
                )
                continue
            had = [k for k, v in self._holders.items() if v == holder and k != member.partition_id]
            for partition in had:  # it moved
                del self._holders[partition]

    def _refuse(self, node: Node, reason: str) -> None:
        node.member, node.refused = None, reason
        log.warning("refused node %d: %s", node.node_id, reason)

    def _check_examples(self, dealt_out: Callable[[int], Sequence[int] | None]) -> None:
        """Refuse who says to have more of the shared data than its part, if that is known."""
        sharing = {key for key, member in self.members.items() if not member.own_data}
        self._checked = set()
        if not sharing or (sizes := dealt_out(self.partitions)) is None:
            return
        self._checked = sharing
        for node_id in sharing:
            member = self.members[node_id]
            expected = sizes[member.partition_id]
            if member.examples != expected:
                self._refuse(
                    self.nodes[node_id],
                    f"examples is {member.examples}, expected {expected}: so many has partition "
                    f"{member.partition_id} of {member.num_partitions}; give it the server's data",
                )

    def examples(self, member: Member, most: int | None) -> int:
        """As how many examples a member's count: where the server does not know it, at most
        `most`, or ten times the median of all: who is alone with data of its own is no measure."""
        if member.node_id in self._checked:
            return member.examples
        if most is None:
            said = [other.examples for other in self.members.values()]
            most = MOST_TIMES * median_low(said or [member.examples])
        return min(member.examples, most)

    def present(self, grid: Grid) -> list[Member]:
        """The members that are connected now, and nobody waits for their answer; by partition."""
        present = set(grid.get_node_ids())
        nodes = [node for node in self.nodes.values() if node.node_id in present]
        members = [node.member for node in nodes if node.member is not None and not node.question]
        return sorted(members, key=lambda member: member.partition_id)

    def rested(
        self, members: Sequence[Member], kind: str, round_number: int, least: int
    ) -> list[Member]:
        """Those that are to be asked in this round: all, where the others would be too few."""
        awake = [m for m in members if not self.nodes[m.node_id].rests(kind, round_number)]
        return awake if len(awake) >= max(1, least) else list(members)


def _agreed(members: Iterable[Member]) -> int:
    """The number of partitions that most say; of two that as many say, the nearer to how many
    they are."""
    counts = Counter(member.num_partitions for member in members)
    nodes = counts.total()
    return max(counts, key=lambda number: (counts[number], -abs(number - nodes), number))


def listed(reasons: Iterable[str], most: int = 3, between: str = "; ") -> str:
    """Different reasons, the first few of them."""
    different = list(dict.fromkeys(reasons))
    more = len(different) - most
    return between.join(different[:most]) + (f"{between}and {more} more" if more > 0 else "")
