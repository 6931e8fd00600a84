"""Account on a device for what the server may learn of it in a run with noise in shares.

Each round is a Gaussian mechanism whose noise is what two thirds of the clients have added. Several
are one: the account is the sum of 1 / z^2. A device with `max-epsilon` ends its part in the run
before that would exceed it, whatever the server says. The account may be lost when a SuperNode is
started again, and a run that goes on is a new one to Flower. So the server says with each round
what it has seen before; where that is more than the account has, it is believed.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from logging import getLogger

from flwr.app import RecordDict

from ravan_flwr.client.account_book import AccountBook, opened_book
from ravan_flwr.config.node_config import Node
from ravan_flwr.messages.pieces import SEEN
from ravan_flwr.privacy.account import epsilon_seen

log = getLogger(__name__)

ACCOUNT = "noise-account"  # the record in a node's state
_CLOSE = 1e-9  # two accounts of the same rounds


class NoiseAccount:
    """Hold what this device has shown in a run; it lies in the node's state, and in a file."""

    def __init__(self, state: RecordDict, run: int, partition: int) -> None:
        self._state, self._run, self._partition = state, run, partition

    @property
    def seen(self) -> float:
        """Return the sum of 1 / z^2 of the rounds so far."""
        with self._opened() as book:
            return self._read(book)[0]

    def check(self, node: Node, more: float | None = None) -> None:
        """Raise ValueError if one round more is beyond its limit; by default one as the last."""
        with self._opened() as book:
            self._check(book, node, more)

    def believe(self, told: object) -> None:
        """Take the server's own account where it has more; ValueError if that is none."""
        if type(told) is not float or not 0 <= told < math.inf:
            raise ValueError(
                f"{SEEN} = {told!r} in the message: expected what the server has seen of this "
                "client, a finite number from 0; start server and clients with one version"
            )
        with self._opened() as book:
            seen, last = self._read(book)
            if told > seen * (1 + _CLOSE):
                log.info("this client's account is behind the server's, as after a restart")
                self._enter(book, told, last)

    def spend(self, node: Node, more: float) -> None:
        """Count a round, before what it has masked leaves; ValueError if that is too much."""
        with self._opened() as book:
            self._check(book, node, more)
            self._enter(book, self._read(book)[0] + more, more)

    def _opened(self) -> AbstractContextManager[AccountBook]:
        return opened_book(self._state, ACCOUNT, self._run, self._partition)

    def _check(self, book: AccountBook, node: Node, more: float | None) -> None:
        most, delta = node.max_epsilon, node.max_delta
        if most is None:
            return
        seen, last = self._read(book)
        further = last if more is None else more
        if (then := epsilon_seen(seen + further, delta)) > most:
            self._enter(book, seen, further)  # the next round is refused before it begins
            raise ValueError(
                f"max-epsilon = {most:g}: the server has seen {epsilon_seen(seen, delta):.4g} "
                f"of this device in this run, and one more round would take that to {then:.4g}; it "
                "takes part no further"
            )

    def _read(self, book: AccountBook) -> tuple[float, float]:
        """Read the most that any place has, with the last round of that."""
        mine = [entry for entry in book.entries if entry.get("run") == str(self._run)]
        return max(
            ((_number(one, "seen"), _number(one, "last")) for one in mine), default=(0.0, 0.0)
        )

    def _enter(self, book: AccountBook, seen: float, last: float) -> None:
        book.enter({"run": str(self._run), "seen": seen, "last": last})


def _number(entry: Mapping[str, object], name: str) -> float:
    value = entry.get(name)
    return value if type(value) is float and 0 <= value < math.inf else 0.0
