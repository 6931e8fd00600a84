"""Give each part of the data to one node, and check the numbers of examples that nodes claim.

Nodes that share the data must agree in how many parts, since the data is divided by it. First
come, first served: a part stays with the node that had it first, also while that node is away or
asked again. Nodes with data of their own have no say in how the rest is divided.

Numbers of examples that nodes claim are checked, or bounded where they cannot be: such a number
weighs a reply (`weighting=examples`) or an evaluation, so that a false one would outweigh others.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from logging import getLogger
from statistics import median_low

from ravan_flwr.messages.registered_client import MOST_EXAMPLES, RegisteredClient

log = getLogger(__name__)

Members = Collection[RegisteredClient]

MOST_TIMES = 10  # how many times the median a node's own examples count


class Partitions:
    """Decide the number of parts once for the run, and give each part to one node.

    `before` is the number that a resumed run had. `sizes` returns the number of examples in
    each part, if so many share the data; it raises an error where the server has not that data.
    `most` is the operator's bound on examples that the server does not know.
    """

    def __init__(
        self,
        before: int | None = None,
        sizes: Callable[[int], Sequence[int]] | None = None,
        most: int | None = None,
    ) -> None:
        self._before, self._sizes_of, self._most = before, sizes, most
        self._settled: int | None = None  # once nodes that share the data have come
        self._holders: dict[int, int] = {}  # partition id -> the node that had it first
        self._partition_of: dict[int, int] = {}  # and the other way round
        self.owners: dict[int, str] = {}  # partition id -> the key of that node, as a run keeps it
        self._sizes: Sequence[int] | None = None
        self._checked: set[int] = set()  # nodes whose number of examples the server knows

    def number(self, clients: Members) -> int:
        """Return in how many parts the data is shared, as far as these clients tell.

        Nodes that share the data decide: the number is what it was before if one of them says so,
        or else what most of them say. Where every node has data of its own it is what most of them
        say, or as many as they are.
        """
        if self._settled is not None:
            return self._settled
        if sharing := _sharing(clients):
            numbers = {client.num_partitions for client in sharing}
            return self._before if self._before in numbers else _agreed(sharing)
        return max(_agreed(clients), len(clients)) if clients else 1

    def awaited(self, clients: Members) -> int:
        """Return how many nodes to wait for: in a resumed run, as many as before."""
        if self._settled is None and self._before is not None and _sharing(clients):
            return self._before
        return self.number(clients)

    def misfits(self, clients: Members) -> dict[int, str]:
        """Fix the number for the run; say which clients, by node, have another one, and why."""
        sharing = _sharing(clients)
        if sharing:
            self._settled = self.number(clients)
        return {
            client.node_id: f"num-partitions is {client.num_partitions}, expected {self._settled} "
            "as the others have, since the data is partitioned by it; give every SuperNode the same"
            for client in sharing
            if client.num_partitions != self._settled
        }

    def miscounts(self, clients: Members) -> dict[int, str]:
        """Say which nodes claim another number of examples than their part has."""
        sharing, sizes = _sharing(clients), None
        if sharing and self._sizes_of is not None:
            try:
                if self._sizes is None or len(self._sizes) != self.number(clients):
                    self._sizes = self._sizes_of(self.number(clients))
                sizes = self._sizes
            except (ValueError, OSError, RuntimeError) as error:
                log.warning("the nodes' numbers of examples are not checked: %s", error)
                self._sizes_of = None
        self._checked = set() if sizes is None else {client.node_id for client in sharing}
        return {
            client.node_id: f"examples is {client.examples}, expected {sizes[client.partition_id]} "
            f"as partition {client.partition_id} of {client.num_partitions} has; give it the "
            "server's data"
            for client in sharing
            if sizes is not None and client.examples != sizes[client.partition_id]
        }

    def forget_strangers(self, keys: Collection[str]) -> None:
        """Forget the owners where the keys of as many nodes are all new, as without their keys."""
        most = 2 * len(keys) >= len(self.owners)
        if self.owners and most and not set(keys) & set(self.owners.values()):
            log.warning("no node has its key of before: partitions are bound to the new keys")
            self.owners.clear()

    def claim(self, client: RegisteredClient, key: str = "") -> str:
        """Give a client its part, by the key of its node; say why not, if another node holds it."""
        if key and self.owners.get(client.partition_id, key) != key:
            return (
                f"partition-id {client.partition_id} belongs to a node with another key since the "
                "run began; give every SuperNode its own. If that one's key was replaced, remove "
                f"{client.partition_id} from node-keys.json in the run directory, and resume"
            )
        holder = self._holders.setdefault(client.partition_id, client.node_id)
        if holder != client.node_id:
            return (
                f"partition-id {client.partition_id} is taken by node {holder}; give every "
                "SuperNode its own"
            )
        before = self._partition_of.get(holder, client.partition_id)
        if before != client.partition_id:  # it moved
            del self._holders[before]
            self.owners.pop(before, None)
        self._partition_of[holder] = client.partition_id
        if key:
            self.owners[client.partition_id] = key
        return ""

    def check(self, clients: Members, least: int) -> None:
        """Raise ValueError unless a run can begin: parts as before, enough for `least` replies."""
        now = self.number(clients)
        if _sharing(clients) and self._before not in (None, now):
            raise ValueError(
                f"resume: the nodes have num-partitions = {now}, expected {self._before} as "
                "before, since the data is partitioned by it; start as many clients again"
            )
        if now < least:
            raise ValueError(
                f"min-replies = {least}: the nodes have num-partitions = {now}, and a round gets "
                "no more replies than that; start more clients, or lower min-replies (with "
                "secure-aggregation=true it is secure-minimum at least)"
            )

    def most_examples(self, clients: Members) -> int:
        """Return by how many examples one of these is weighted at most, where nobody knows better.

        That is what the operator says, or ten times the median of all: a node that alone has data
        of its own is no measure of itself.
        """
        claimed = [client.examples for client in clients] or [MOST_EXAMPLES]
        return MOST_TIMES * median_low(claimed) if self._most is None else self._most

    def examples(self, client: RegisteredClient, most: int) -> int:
        """Return by how many examples a client is weighted; `most` where they are not known."""
        return client.examples if client.node_id in self._checked else min(client.examples, most)


def _sharing(clients: Members) -> list[RegisteredClient]:
    """List the clients that share the data."""
    return [client for client in clients if not client.own_data]


def _agreed(clients: Members) -> int:
    """Return the number of partitions that most say; on a tie, the nearer to how many they are."""
    counts = Counter(client.num_partitions for client in clients)
    nodes = counts.total()
    return max(counts, key=lambda number: (counts[number], -abs(number - nodes), number))
