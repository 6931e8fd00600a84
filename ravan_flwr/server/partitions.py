"""Assign each partition of the data to one node, and check the nodes' numbers of examples.

Nodes that share the data must have the same `num-partitions`, since the data is partitioned by it.
A partition stays with the node that claimed it first, also while that node is disconnected or
queried again. Nodes with data of their own have no influence on the number of partitions.

A number of examples is the weight of a reply (`weighting=examples`) or of an evaluation, so a false
one would outweigh other clients. The numbers are checked, or bounded where that is impossible.
"""

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from logging import getLogger
from statistics import median_low

from ravan_flwr.messages.registered_client import MOST_EXAMPLES, RegisteredClient

log = getLogger(__name__)

Clients = Collection[RegisteredClient]

MAX_MEDIANS = 10  # times the median: the most examples that a node's own data count


class Partitions:
    """Fix the number of partitions for the run, and assign each partition to one node.

    Args:
        before: The number of partitions of a resumed run; None in a new run.
        sizes: Returns each partition's number of examples, given the number of partitions. Raises
            an error if the server does not have the data.
        max_examples: The operator's bound on numbers of examples that the server does not know.
    """

    def __init__(
        self,
        before: int | None = None,
        sizes: Callable[[int], Sequence[int]] | None = None,
        max_examples: int | None = None,
    ) -> None:
        self._before, self._sizes_of, self._max_examples = before, sizes, max_examples
        self._settled: int | None = None  # None until nodes that share the data have connected
        self._holders: dict[int, int] = {}  # partition id -> the node that claimed it first
        self._partition_of: dict[int, int] = {}  # node id -> partition id
        self.owners: dict[int, str] = {}  # partition id -> hash of the node's key, kept by the run
        self._sizes: Sequence[int] | None = None
        self._checked: set[int] = set()  # nodes whose number of examples the server knows

    def number(self, clients: Clients) -> int:
        """Return the number of partitions, as reported by these clients.

        Nodes that share the data decide it. The number is that of the resumed run if one of these
        nodes reports it, else the most frequent one. If all nodes have data of their own, it is the
        most frequent number, but at least the number of nodes.
        """
        if self._settled is not None:
            return self._settled
        if sharing := _sharing(clients):
            numbers = {client.num_partitions for client in sharing}
            return self._before if self._before in numbers else _agreed(sharing)
        return max(_agreed(clients), len(clients)) if clients else 1

    def awaited(self, clients: Clients) -> int:
        """Return how many nodes to wait for: in a resumed run, as many as before."""
        if self._settled is None and self._before is not None and _sharing(clients):
            return self._before
        return self.number(clients)

    def partition_mismatches(self, clients: Clients) -> dict[int, str]:
        """Fix the number for the run; return an error message for each node with another number."""
        sharing = _sharing(clients)
        if sharing:
            self._settled = self.number(clients)
        return {
            client.node_id: f"num-partitions is {client.num_partitions}, expected {self._settled} "
            "as the others have, since the data is partitioned by it; give every SuperNode the same"
            for client in sharing
            if client.num_partitions != self._settled
        }

    def example_mismatches(self, clients: Clients) -> dict[int, str]:
        """Return an error message for each node whose number of examples is not its partition's."""
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

    def forget_replaced_keys(self, keys: Collection[str]) -> None:
        """Forget the owners if no node has a known key and as many as half of the owners are here.

        This happens if nodes are started again without their keys.
        """
        enough = 2 * len(keys) >= len(self.owners)
        if self.owners and enough and not set(keys) & set(self.owners.values()):
            log.warning("no node has its earlier key: partitions are bound to the new keys")
            self.owners.clear()

    def claim(self, client: RegisteredClient, key: str = "") -> str:
        """Assign a client its partition; return why not if another node holds it, else "".

        `key` identifies the node's partition when the run is resumed.
        """
        if key and self.owners.get(client.partition_id, key) != key:
            return (
                f"partition-id {client.partition_id} belongs to a node with another key since the "
                "run began; give every SuperNode its own. If that node's key was replaced, remove "
                f"{client.partition_id} from node-keys.json in the run directory, and resume"
            )
        holder = self._holders.setdefault(client.partition_id, client.node_id)
        if holder != client.node_id:
            return (
                f"partition-id {client.partition_id} is taken by node {holder}; give every "
                "SuperNode its own"
            )
        before = self._partition_of.get(holder, client.partition_id)
        if before != client.partition_id:  # the node has another partition now
            del self._holders[before]
            self.owners.pop(before, None)
        self._partition_of[holder] = client.partition_id
        if key:
            self.owners[client.partition_id] = key
        return ""

    def check(self, clients: Clients, min_replies: int) -> None:
        """Raise ValueError unless `num-partitions` is the resumed run's, and `min_replies` or more.

        A round gets at most as many replies as there are partitions.
        """
        now = self.number(clients)
        if _sharing(clients) and self._before not in (None, now):
            raise ValueError(
                f"resume: the nodes have num-partitions = {now}, expected {self._before} as "
                "before, since the data is partitioned by it; start as many clients again"
            )
        if now < min_replies:
            raise ValueError(
                f"min-replies = {min_replies}: the nodes have num-partitions = {now}, and a round "
                "gets no more replies than that; start more clients, or lower min-replies (with "
                "secure-aggregation=true it is secure-minimum at least)"
            )

    def max_examples(self, clients: Clients) -> int:
        """Return the largest weight, in examples, of a client whose number is not checked.

        It is the operator's bound, or ten times the median of all clients. So the only node with
        data of its own does not set its own bound.
        """
        claimed = [client.examples for client in clients] or [MOST_EXAMPLES]
        if self._max_examples is not None:
            return self._max_examples
        return MAX_MEDIANS * median_low(claimed)

    def examples(self, client: RegisteredClient, limit: int) -> int:
        """Return a client's weight in examples: its number, or a lower `limit` if unchecked."""
        return client.examples if client.node_id in self._checked else min(client.examples, limit)


def _sharing(clients: Clients) -> list[RegisteredClient]:
    """Return the clients that have no data of their own."""
    return [client for client in clients if not client.own_data]


def _agreed(clients: Clients) -> int:
    """Return the most frequent number of partitions; on a tie, the nearest to the node count."""
    counts = Counter(client.num_partitions for client in clients)
    nodes = counts.total()
    return max(counts, key=lambda number: (counts[number], -abs(number - nodes), number))
