"""End a run when its metric has reached a value (`until-metric`).

Of perplexity, and of whatever is the better the lower, it is reached from above. Only rounds with
an evaluation can tell: `eval-every` says which.
"""

from collections.abc import Iterable
from logging import getLogger

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.collapse_detection import merit
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.specs import LOWER_IS_BETTER

log = getLogger(__name__)


class MetricTarget:
    """Say whether a run has reached what it was to reach, and in which round it did so first."""

    def __init__(self, value: float, metric: str, records: Iterable[RoundRecord]) -> None:
        self.value, self.metric = value, metric  # 0: there is none
        self.round: int | None = None
        self._measured = 0.0
        for record in records:
            self._see(record)

    @classmethod
    def of(cls, config: Config, metric: str, records: Iterable[RoundRecord]) -> "MetricTarget":
        """Make a run's; ValueError for a value that its metric cannot reach."""
        value, lower = config.until_metric, metric in LOWER_IS_BETTER
        if value and (value < 1 if lower else value > 1):
            expected = "1 or more, since none is lower" if lower else "a share, 1 at most"
            hint = f"; write {value / 100:g}?" if not lower and value <= 100 else ""
            raise ValueError(
                f"until-metric = {value:g}: the metric is {metric}, expected {expected}; correct "
                f"it, or leave it out{hint}"
            )
        return cls(value, metric, records)

    def add(self, record: RoundRecord) -> None:
        """See a round that has ended, and note in its record if it has reached the value."""
        if self._see(record):
            record["reached"] = self.value

    def _see(self, record: RoundRecord) -> bool:
        metrics = record["metrics"]
        if not self.value or self.metric not in metrics:
            return False
        if merit(metrics, self.metric) < merit({self.metric: self.value}, self.metric):
            return False
        if self.round is None:
            self.round, self._measured = record["round"], metrics[self.metric]
        return True

    @property
    def is_spent(self) -> bool:
        """Tell whether the value is reached."""
        return self.round is not None

    @property
    def is_last(self) -> bool:
        """Tell that no round is known to reach the value before it is evaluated."""
        return False

    def tell(self, number: int) -> None:  # noqa: ARG002 (a Limit's)
        """Log that the run ends."""
        log.info(
            "until-metric = %g: reached in round %d (%s %.4f); the run ends here; for more rounds "
            "set another value, or 0",
            *(self.value, self.round, self.metric, self._measured),
        )
