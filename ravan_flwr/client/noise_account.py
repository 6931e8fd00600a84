"""Account on a device for what the server may learn of it in a run with noise in shares.

Each round is a Gaussian mechanism whose noise is what two thirds of the clients have added. Several
are one: the account is the sum of 1 / z^2. A device with `max-epsilon` ends its part in the run
before that would exceed it, whatever the server says. It forgets the account when it is started
again: Flower keeps a node's state as long as its SuperNode runs.
"""

import math
from collections.abc import Mapping

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.config.node_config import Node
from ravan_flwr.privacy.account import epsilon_seen

ACCOUNT = "noise-account"  # the record in a node's state


class NoiseAccount:
    """Hold what this device has shown in a run; it lies in the node's state."""

    def __init__(self, state: RecordDict, run: int) -> None:
        self._state, self._run = state, str(run)
        kept = state.config_records.get(ACCOUNT, ConfigRecord())
        mine: Mapping[str, object] = kept if kept.get("run") == self._run else {}
        self.seen, self.last = (_number(mine.get(name)) for name in ("seen", "last"))

    def check(self, node: Node, more: float | None = None) -> None:
        """Raise ValueError if one round more is beyond its limit; by default one as the last."""
        most, delta = node.max_epsilon, node.max_delta
        if most is None:
            return
        further = self.seen + (self.last if more is None else more)
        if (then := epsilon_seen(further, delta)) > most:
            raise ValueError(
                f"max-epsilon = {most:g}: the server has seen {epsilon_seen(self.seen, delta):.4g} "
                f"of this device in this run, and one more round would take that to {then:.4g}; it "
                "takes part no further"
            )

    def add(self, more: float) -> None:
        """Count a round; before what it has masked leaves."""
        self.seen, self.last = self.seen + more, more
        self._state[ACCOUNT] = ConfigRecord(
            {"run": self._run, "seen": self.seen, "last": self.last}
        )


def _number(value: object) -> float:
    return value if type(value) is float and 0 <= value < math.inf else 0.0
