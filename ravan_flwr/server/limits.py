"""End a run in good order before its last round: at a value reached, bytes or epsilon spent."""

from typing import Protocol

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.server.allowance import Allowance
from ravan_flwr.server.start import Start
from ravan_flwr.server.target import Target


class Limit(Protocol):
    """Say when a run ends, though it was to have more rounds."""

    def add(self, record: RoundRecord) -> None:
        """See a round that has ended, before it is recorded."""

    @property
    def is_spent(self) -> bool:
        """Tell whether no further round is to be held."""

    @property
    def is_last(self) -> bool:
        """Tell whether the round that begins is known to be the last."""

    def tell(self, number: int) -> None:
        """Log why that round is not held."""


def limits_of(config: Config, metric: str, start: Start) -> list[Limit]:
    """Make those of a run that begins there; ValueError for what no round can keep."""
    return [
        Target.of(config, metric, start.records),
        Allowance.of(config, start.records),
    ]
