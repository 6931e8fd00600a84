"""Count the bytes of a secure round, as the two halves write them, where nobody fails."""

from dataclasses import dataclass

from ravan_flwr.secure import agreement, shamir
from ravan_flwr.secure.fixed_point import WIDTH
from ravan_flwr.secure.node_keys import SIGNATURE
from ravan_flwr.secure.schedule import Schedule
from ravan_flwr.secure.transcript import ENTRY, MARK


@dataclass(frozen=True)
class Bytes:
    """Count what one client sends and gets in a round, without what it trained and the state."""

    up: int
    down: int
    whole: int | None = None  # numbers that each sends, where what it trains does not say that


def masked_bytes(numbers: int) -> int:
    """Count the bytes of so many masked numbers."""
    return WIDTH * numbers


def around(schedule: Schedule, place: int) -> Bytes:
    """Count the bytes of all phases around one client's masked numbers."""
    number = len(schedule.partitions)
    groups = [len(schedule.groups_of(other)) for other in range(number)]
    mine, list_ = groups[place], -(-number // 8)
    share = shamir.SHARE + MARK
    dealt = number * ((1 + mine) * share + agreement.TAG) + mine * MARK
    opened = shamir.SHARE * sum(groups)
    up = ENTRY + agreement.KEY + dealt + SIGNATURE + opened
    given = [(1 + each) * share + agreement.TAG for each in groups]
    down = len(schedule.to_bytes()) + number * ENTRY  # the roll
    down += sum(given) - given[place] + 3 * list_ + number * SIGNATURE
    return Bytes(up, down)


def most_around(schedule: Schedule) -> Bytes:
    """Count the most of any client."""
    each = [around(schedule, place) for place in range(len(schedule.partitions))]
    whole = int(schedule.sizes.sum()) if schedule.noise else None
    return Bytes(max(one.up for one in each), max(one.down for one in each), whole)
