"""End a run in good order before its last round: at a value reached, bytes or epsilon spent."""

from typing import Protocol

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.server.byte_budget import ByteBudget
from ravan_flwr.server.metric_target import MetricTarget
from ravan_flwr.server.resume import ResumePoint


class StopCondition(Protocol):
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


def stop_conditions_of(config: Config, metric: str, start: ResumePoint) -> list[StopCondition]:
    """Make those of a run that begins there; ValueError for what no round can keep."""
    return [
        MetricTarget.of(config, metric, start.records),
        ByteBudget.of(config, start.records),
    ]
