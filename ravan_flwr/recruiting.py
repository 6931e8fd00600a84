"""How the roster fills: nodes are asked the one question when they are first seen, or seen again.

The run begins when they have answered. Nobody waits for a node that comes later, or comes back: it
takes part from the round after its answer.
"""

import time
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from logging import getLogger

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.exchange import push
from ravan_flwr.fingerprint import code_fingerprint
from ravan_flwr.replies import content_of
from ravan_flwr.roster import Member, check_same_app, read_member

log = getLogger(__name__)

NODES_TIMEOUT = 60.0  # seconds to wait for the first node
ROSTER_TIMEOUT = 20.0  # seconds to wait for the rest, from the last that came
QUERY_TIMEOUT = 1800.0  # seconds for an answer: a node loads its model and data first


class Recruiter:
    """The members so far, and the nodes that were refused.

    Every member has this server's code, `backbone` and `derived` fingerprints. `meant` is
    how many clients the preset means, `parts` in how many a run that goes on shared its data, and
    `max_share` the largest budget that the operator grants.
    """

    def __init__(
        self,
        meant: int,
        backbone: str,
        derived: list[float],
        parts: int | None = None,
        max_share: float = 1.0,
    ) -> None:
        self.meant, self.max_share = meant, max_share
        self.code, self.backbone, self.derived = code_fingerprint(), backbone, derived
        self.members: dict[int, Member] = {}  # by node id
        self.refused: dict[int, str] = {}  # node id -> reason
        self._asked: dict[str, tuple[int, float]] = {}  # message id -> node id, until when
        self._visits: dict[int, str] = {}  # node id -> since when it was there when it was asked
        self._times: Counter[int] = Counter()  # how often each node was asked
        self._parts_before = parts
        self._parts: int | None = None  # in how many the shared data is dealt out

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Ask nodes that are new, take the answers that came; at the start, wait for both."""
        patience = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        pause = 0.05
        while True:
            self._ask(grid)
            if self._take_answers(grid) and wait:
                patience, pause = time.monotonic() + ROSTER_TIMEOUT, 0.05
            # Whoever dies whenever it is asked, and comes back, is not waited for again.
            waiting = wait and any(self._times[node_id] == 1 for node_id, _ in self._asked.values())
            all_here = len(self.members) + len(self.refused) >= self.partitions
            if not waiting and (all_here or time.monotonic() >= patience):
                break
            time.sleep(pause)
            pause = min(1.2 * pause, 0.5)
        self._agree()
        self._refuse_doubles()
        if not self.members:
            raise RuntimeError(
                f"no node to train on: {listed(self.refused.values()) or 'none is connected'}. "
                "Expected at least one that can train; start SuperNodes"
            )
        if wait:
            self._introduce()

    @property
    def partitions(self) -> int:
        """In how many parts the members say that the data is shared."""
        return max((m.num_partitions for m in self.members.values()), default=1)

    def _introduce(self) -> None:
        """Say who is there, and how to have as many as the preset means."""
        members = self.members.values()
        shares = sorted({m.share for m in members})
        log.info(
            "%d nodes with %d examples, budgets %s, on %s",
            len(members), sum(m.examples for m in members),
            ", ".join(f"{s:g}" for s in shares), ", ".join(sorted({m.device for m in members})),
        )  # fmt: skip
        if (missing := self.partitions - len(members)) > 0:
            log.warning("%d of the nodes' partitions have no node; they are left out", missing)
        if len(members) < self.meant:
            log.info(
                "the preset means %d clients; a simulation has them with: flwr run . --stream "
                '--federation-config "num-supernodes=%d client-resources-num-cpus=1"',
                self.meant, self.meant,
            )  # fmt: skip

    def _ask(self, grid: Grid) -> None:
        """The nodes that nobody asked, or that were away since then: they may have changed."""
        visits = {node.node_id: node.last_activated_at for node in grid.get_nodes()}
        for node_id in [n for n, since in self._visits.items() if visits.get(n) != since]:
            del self._visits[node_id]
            self.refused.pop(node_id, None)
            self._asked = {k: asked for k, asked in self._asked.items() if asked[0] != node_id}
        new = [node_id for node_id in visits if node_id not in self._visits]
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in new]
        until = time.monotonic() + QUERY_TIMEOUT
        for message in push(grid, messages) if messages else ():
            node_id = message.metadata.dst_node_id
            self._asked[message.metadata.message_id] = node_id, until
            self._visits[node_id] = visits[node_id]
            self._times[node_id] += 1

    def _take_answers(self, grid: Grid) -> bool:
        """Take those that are there; is one of them the first of its node?"""
        first = False
        while self._asked and (replies := list(grid.pull_messages(set(self._asked)))):
            for reply in replies:
                node_id, _ = self._asked.pop(reply.metadata.reply_to_message_id)
                self._take_answer(node_id, reply)
                first = first or self._times[node_id] == 1
        for key, (node_id, until) in list(self._asked.items()):
            if time.monotonic() >= until:
                del self._asked[key]
                self._refuse(node_id, f"no answer within {QUERY_TIMEOUT:g} s")
        return first

    def _take_answer(self, node_id: int, reply: Message) -> None:
        try:
            member = read_member(node_id, content_of(reply).config_records["member"])
            check_same_app(member, self.code, self.backbone, self.derived)
        except (ValueError, KeyError) as error:
            self._refuse(node_id, str(error))
        else:
            share = min(member.share, self.max_share)
            self.members[node_id] = replace(member, share=share)

    def _agree(self) -> None:
        """Refuse whose data is dealt out in another number of parts than most have at the start,
        or than the run had before."""
        dealt_out = [member for member in self.members.values() if not member.own_data]
        if self._parts is None and dealt_out:
            counts = Counter(member.num_partitions for member in dealt_out)
            before = self._parts_before
            self._parts = before if before in counts else max(counts, key=lambda n: (counts[n], n))
        for member in dealt_out:
            if member.num_partitions != self._parts:
                self._refuse(
                    member.node_id,
                    f"num-partitions is {member.num_partitions}, expected {self._parts} as the "
                    "others have, since the data is dealt out by it; give every SuperNode the same",
                )

    def _refuse_doubles(self) -> None:
        """Refuse whoever has another's part of the data: the first that came keeps it."""
        holders: dict[int, int] = {}
        for member in list(self.members.values()):
            holder = holders.setdefault(member.partition_id, member.node_id)
            if holder != member.node_id:
                self._refuse(
                    member.node_id,
                    f"partition-id {member.partition_id} is taken by node {holder}; give every "
                    "SuperNode its own",
                )

    def _refuse(self, node_id: int, reason: str) -> None:
        self.members.pop(node_id, None)
        self.refused[node_id] = reason
        log.warning("refused node %d: %s", node_id, reason)

    def present(self, grid: Grid) -> list[Member]:
        """The members that are connected now, and nobody waits for their answer; by partition."""
        present = set(grid.get_node_ids()) - {node_id for node_id, _ in self._asked.values()}
        members = [m for m in self.members.values() if m.node_id in present]
        return sorted(members, key=lambda member: member.partition_id)


def listed(reasons: Iterable[str], most: int = 3) -> str:
    """Different reasons, the first few of them."""
    different = list(dict.fromkeys(reasons))
    more = len(different) - most
    return "; ".join(different[:most]) + (f"; and {more} more" if more > 0 else "")
