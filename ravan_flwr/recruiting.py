"""How the roster fills: nodes are asked the one question when they are first seen."""

import time
from collections.abc import Iterable
from logging import getLogger

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from ravan_flwr.exchange import pull_replies, push
from ravan_flwr.fingerprint import code_fingerprint
from ravan_flwr.replies import content_of
from ravan_flwr.roster import Member, check_same_app, read_member

log = getLogger(__name__)

NODES_TIMEOUT = 60.0  # seconds to wait for the first node
ROSTER_TIMEOUT = 20.0  # seconds to wait for the rest, from the last that came
QUERY_TIMEOUT = (
    1800.0  # seconds to wait for answers: a node loads, and reads, its model and data first
)


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

    def recruit(self, grid: Grid, *, wait: bool = False) -> None:
        """Ask every node that is new the one question; at the start, wait for them to come."""
        patience = time.monotonic() + (NODES_TIMEOUT if wait else 0.0)
        while True:
            known = self.members.keys() | self.refused.keys()
            if new := [node_id for node_id in grid.get_node_ids() if node_id not in known]:
                self._ask(grid, new)
                patience = time.monotonic() + (ROSTER_TIMEOUT if wait else 0.0)
            if len(self.members) + len(self.refused) >= self.partitions:
                break
            if time.monotonic() >= patience:
                break
            time.sleep(0.05)
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

    def _ask(self, grid: Grid, nodes: Iterable[int]) -> None:
        messages = [Message(RecordDict(), node_id, MessageType.QUERY) for node_id in nodes]
        asked = {m.metadata.message_id: m.metadata.dst_node_id for m in push(grid, messages)}
        for reply in pull_replies(grid, set(asked), QUERY_TIMEOUT):
            node_id = asked.pop(reply.metadata.reply_to_message_id)
            try:
                member = read_member(node_id, content_of(reply).config_records["member"])
                taken = {m.partition_id: m.node_id for m in self.members.values()}
                if member.partition_id in taken:
                    raise ValueError(
                        f"partition-id {member.partition_id} is taken by node "
                        f"{taken[member.partition_id]}; give every SuperNode its own"
                    )
                check_same_app(member, self.code, self.backbone, self.derived)
            except (ValueError, KeyError) as error:
                self._refuse(node_id, str(error))
            else:
                self.members[node_id] = member
        for node_id in asked.values():
            self._refuse(node_id, f"no answer within {QUERY_TIMEOUT:g} s")

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
