"""How the roster fills: nodes are asked the one question when they are first seen.

The run begins when they have answered. Nobody waits for a node that comes later: it takes part from
the round after its answer.
"""

import time
from collections import Counter
from collections.abc import Iterable
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
AWAY = {3, 4, 5}  # Flower's codes of what became of a message whose node is gone


class Recruiter:
    """The members so far, and the nodes that were refused.

    Every member has this server's code, `backbone` and `derived` fingerprints. `meant` is
    how many clients the preset means.
    """

    def __init__(self, meant: int, backbone: str, derived: list[float]) -> None:
        self.meant = meant
        self.code, self.backbone, self.derived = code_fingerprint(), backbone, derived
        self.members: dict[int, Member] = {}  # by node id
        self.refused: dict[int, str] = {}  # node id -> reason
        self._asked: dict[str, tuple[int, float]] = {}  # message id -> node id, until when
        self._parts: int | None = None  # in how many the shared data is dealt out

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Ask nodes that are new, take the answers that came; at the start, wait for both."""
        patience = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        while True:
            self._ask(grid)
            if self._take_answers(grid) and wait:
                patience = time.monotonic() + ROSTER_TIMEOUT
            all_here = len(self.members) + len(self.refused) >= self.partitions
            if not (wait and self._asked) and (all_here or time.monotonic() >= patience):
                break
            time.sleep(0.05)
        self._agree()
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
        """The nodes that nobody asked; one that was refused, if it was away since then."""
        connected = list(grid.get_node_ids())
        for node_id in self.refused.keys() - set(connected):
            del self.refused[node_id]
        known = {*self.members, *self.refused, *(node_id for node_id, _ in self._asked.values())}
        new = [node_id for node_id in connected if node_id not in known]
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in new]
        until = time.monotonic() + QUERY_TIMEOUT
        for message in push(grid, messages) if messages else ():
            self._asked[message.metadata.message_id] = message.metadata.dst_node_id, until

    def _take_answers(self, grid: Grid) -> int:
        """Members, and refusals, of the answers that are there; how many they were."""
        number = 0
        while self._asked and (replies := list(grid.pull_messages(set(self._asked)))):
            for reply in replies:
                node_id, _ = self._asked.pop(reply.metadata.reply_to_message_id)
                self._take_answer(node_id, reply)
                number += 1
        overdue = [key for key, (_, until) in self._asked.items() if time.monotonic() >= until]
        for key in overdue:
            node_id, _ = self._asked.pop(key)
            self._refuse(node_id, f"no answer within {QUERY_TIMEOUT:g} s")
        return number + len(overdue)

    def _take_answer(self, node_id: int, reply: Message) -> None:
        if reply.has_error() and reply.error.code in AWAY:
            log.warning("node %d went away when it was asked; it is asked again", node_id)
            return
        try:
            member = read_member(node_id, content_of(reply).config_records["member"])
            self._check_place(member)
            check_same_app(member, self.code, self.backbone, self.derived)
        except (ValueError, KeyError) as error:
            self._refuse(node_id, str(error))
        else:
            self.members[node_id] = member

    def _check_place(self, member: Member) -> None:
        """Raise ValueError if its part of the data is another's already."""
        for other in self.members.values():
            if other.partition_id == member.partition_id:
                raise ValueError(
                    f"partition-id {member.partition_id} is taken by node {other.node_id}; give "
                    "every SuperNode its own"
                )

    def _agree(self) -> None:
        """Refuse whose data is dealt out in another number of parts than most have at the start."""
        dealt_out = [member for member in self.members.values() if not member.own_data]
        if self._parts is None and dealt_out:
            counts = Counter(member.num_partitions for member in dealt_out)
            self._parts = counts.most_common(1)[0][0]
        for member in dealt_out:
            if member.num_partitions != self._parts:
                del self.members[member.node_id]
                self._refuse(
                    member.node_id,
                    f"num-partitions is {member.num_partitions}, expected {self._parts} as the "
                    "others have, since the data is dealt out by it; give every SuperNode the same",
                )

    def _refuse(self, node_id: int, reason: str) -> None:
        self.refused[node_id] = reason
        log.warning("refused node %d: %s", node_id, reason)

    def present(self, grid: Grid) -> list[Member]:
        """The members that are connected now, by partition id."""
        present = set(grid.get_node_ids())
        members = [m for m in self.members.values() if m.node_id in present]
        return sorted(members, key=lambda member: member.partition_id)


def listed(reasons: Iterable[str], most: int = 3) -> str:
    """Different reasons, the first few of them."""
    different = list(dict.fromkeys(reasons))
    more = len(different) - most
    return "; ".join(different[:most]) + (f"; and {more} more" if more > 0 else "")
