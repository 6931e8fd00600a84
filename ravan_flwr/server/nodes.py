"""Record what the server knows of each node: its answer, and how it behaves."""

from dataclasses import dataclass, field

from flwr.app import MessageType

from ravan_flwr.messages.registered_client import RegisteredClient

LONG = 64  # rounds


@dataclass
class Node:
    """Keep the record of one node."""

    node_id: int
    since: str | None = None  # since when it was there as it was asked; None: it is to be asked
    question: str = ""  # the message that its answer is waited for; "" if none is
    until: float = 0.0  # for how long
    last: str = ""  # the message that it was asked by the last time
    times: int = 0  # how often it was asked
    member: RegisteredClient | None = None
    refused: str = ""  # why
    # By kind of message, since who answers one kind alone would be asked for the other for ever:
    silent: dict[str, int] = field(default_factory=dict)  # how many in a row had no reply
    asleep: dict[str, int] = field(default_factory=dict)  # the first round in which it is asked
    faults: int = 0  # how many of its replies in a row were no good
    disputes: set[int] = field(default_factory=set)  # partitions: one of both is at fault
    heard: float = 0.0  # when it last sent something, in seconds since 1970

    @property
    def doubt(self) -> int:
        """Count silences and faults of the node; replies of nodes with fewest are read first."""
        return sum(self.silent.values()) + self.faults

    def was_asked(self, question: str, since: str, until: float) -> None:
        """Note the message that it was asked by, and for how long its answer is waited for."""
        self.question = self.last = question
        self.since, self.until = since, until
        self.times += 1

    def forget_unless(self, since: str | None) -> None:
        """Forget its answer, so that it is asked again, unless it was connected ever since."""
        if self.since is not None and since != self.since:
            self.since, self.refused, self.question = None, "", ""

    def was_silent(self, kind: str, round_number: int) -> None:
        """Ask it less often: after the k-th silence in a row it sits out 2^(k-1) - 1 rounds."""
        self.silent[kind] = self.silent.get(kind, 0) + 1
        self.asleep[kind] = round_number + 2 ** min(self.silent[kind] - 1, 6)

    def rest(self, kind: str, round_number: int) -> None:
        """Leave it out of many rounds: with it they would have no effect."""
        self.asleep[kind] = round_number + LONG

    def answered(self, kind: str) -> None:
        """Note that it replied: from now on it may be asked for this in every round."""
        self.silent.pop(kind, None)
        self.asleep.pop(kind, None)
        self.faults = 0

    def rests(self, kind: str, round_number: int) -> bool:
        """Return whether it sits this round out; a node that does not train does not evaluate."""
        return any(self.asleep.get(one, 0) > round_number for one in (kind, MessageType.TRAIN))
