"""Check the numbers of examples that nodes claim, and bound those that cannot be checked.

Such a number weighs a reply (`weighting=examples`) or an evaluation, so that a false one would
outweigh all others.
"""

from collections.abc import Callable, Collection, Sequence
from logging import getLogger
from statistics import median_low

from ravan_flwr.messages.registered_client import MOST_EXAMPLES, RegisteredClient

log = getLogger(__name__)

MOST_TIMES = 10  # how many times the median a node's own examples count


class ExampleCounts:
    """Compare what nodes claim with what the server dealt out.

    `partition_sizes` returns the number of examples in each part, if so many share the data; it
    raises an error where the server has not that data. `most` is the operator's bound on examples
    that the server does not know.
    """

    def __init__(
        self, partition_sizes: Callable[[int], Sequence[int]] | None = None, most: int | None = None
    ) -> None:
        self._dealt_out, self._most = partition_sizes, most
        self._sizes: Sequence[int] | None = None
        self._checked: set[int] = set()  # nodes whose number of examples the server knows

    def misfits(self, members: Collection[RegisteredClient], parts: int) -> dict[int, str]:
        """Say which nodes claim another number than their part has, and what is wrong."""
        sharing = [member for member in members if not member.own_data]
        sizes = self._sizes_of(parts) if sharing else None
        self._checked = set() if sizes is None else {member.node_id for member in sharing}
        if sizes is None:
            return {}
        return {
            member.node_id: f"examples is {member.examples}, expected {sizes[member.partition_id]} "
            f"as partition {member.partition_id} of {member.num_partitions} has; give it the "
            "server's data"
            for member in sharing
            if member.examples != sizes[member.partition_id]
        }

    def most(self, members: Collection[RegisteredClient]) -> int:
        """Return by how many examples one of these is weighted at most, where nobody knows better.

        That is what the operator says, or ten times the median of all: a node that alone has data
        of its own is no measure of itself.
        """
        if self._most is not None:
            return self._most
        claimed = [member.examples for member in members]
        return MOST_TIMES * median_low(claimed or [MOST_EXAMPLES])

    def counted(self, member: RegisteredClient, most: int) -> int:
        """Return by how many examples a member is weighted; `most` where they are not known."""
        return member.examples if member.node_id in self._checked else min(member.examples, most)

    def _sizes_of(self, parts: int) -> Sequence[int] | None:
        """Return the number of examples in each part; None where the server has not the data."""
        if self._dealt_out is None:
            return None
        try:
            if self._sizes is None or len(self._sizes) != parts:
                self._sizes = self._dealt_out(parts)
        except (ValueError, OSError, RuntimeError) as error:
            log.warning("the nodes' numbers of examples are not checked: %s", error)
            self._dealt_out = self._sizes = None
        return self._sizes
