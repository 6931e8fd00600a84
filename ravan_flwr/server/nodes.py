"""What the server knows of each node, and which of them a round samples.

Simulated node ids are random, so nothing may depend on them: a round's clients are a function of
(seed, round) and the members, sorted by partition id.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from flwr.app import MessageType

from ravan_flwr.messages.member import Member
from ravan_flwr.seeding import generator


def sample(
    members: Sequence[Member], number: int, seed: int, round_number: int, spare: int = 0
) -> list[Member]:
    """The clients of a round, a function of its number, sorted by partition id.

    So many `spare` ones follow, sorted likewise: the first are the same with or without them.
    """
    order = torch.randperm(len(members), generator=generator(seed, "sample", round_number))
    pool = sorted(members, key=lambda member: member.partition_id)
    wanted, more = order[:number], order[number : number + spare]
    return [pool[i] for part in (wanted, more) for i in sorted(part.tolist())]


@dataclass
class Node:
    """What is known of one node: when it was asked who it is, what it answered, how it behaves."""

    node_id: int
    since: str | None = None  # since when it was there as it was asked; None: it is to be asked
    question: str = ""  # the message that its answer is waited for; "" if none is
    until: float = 0.0  # for how long
    last: str = ""  # the message that it was asked by the last time
    times: int = 0  # how often it was asked
    member: Member | None = None
    refused: str = ""  # why
    # By kind of message, since who answers one kind alone would be asked for the other for ever:
    silent: dict[str, int] = field(default_factory=dict)  # how many in a row had no reply
    asleep: dict[str, int] = field(default_factory=dict)  # the first round in which it is asked
    faults: int = 0  # how many of its replies in a row were no good

    @property
    def doubt(self) -> int:
        """How much there is against it: who has least is read first."""
        return sum(self.silent.values()) + self.faults

    def was_silent(self, kind: str, round_number: int) -> None:
        """Ask it less often: after the k-th silence in a row it sits out 2^(k-1) - 1 rounds."""
        self.silent[kind] = self.silent.get(kind, 0) + 1
        self.asleep[kind] = round_number + 2 ** min(self.silent[kind] - 1, 6)

    def answered(self, kind: str) -> None:
        """Ask it for this in every round again."""
        self.silent.pop(kind, None)
        self.asleep.pop(kind, None)
        self.faults = 0

    def rests(self, kind: str, round_number: int) -> bool:
        """Is it not to be asked? Who does not train is not asked to evaluate, either."""
        return any(self.asleep.get(one, 0) > round_number for one in (kind, MessageType.TRAIN))
