"""End a run in good order before its last round: at a value reached, bytes or epsilon spent."""

from collections.abc import Iterable, Sequence
from logging import getLogger

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.collapse_detection import merit
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.tasks import LOWER_IS_BETTER
from ravan_flwr.training.plan import bytes_of_round

log = getLogger(__name__)


class StopCondition:
    """Say when a run ends, though it was to have more rounds."""

    @property
    def is_spent(self) -> bool:
        """Return whether no further round is to be held."""
        raise NotImplementedError

    @property
    def is_last(self) -> bool:
        """Return whether the round that begins is known to be the last."""
        return False

    def add(self, record: RoundRecord) -> None:
        """See a round that has ended, before it is recorded."""

    def tell(self, number: int) -> None:
        """Log why that round is not held."""


class ByteBudget(StopCondition):
    """Keep a run within its bytes (`max-bytes`): the round that no other fits after is the last.

    Counted is what a round's record counts: every message and every reply, of training and of
    evaluations. What devices are sent at the end (`deliver=true`) is not, since nobody knows before
    how many will take it. The next round takes as much as the largest so far, or, before there is
    one, as the plan says.
    """

    def __init__(self, config: Config, records: Sequence[RoundRecord]) -> None:
        """Count the rounds so far; ValueError where not one round of a new run fits."""
        self.most, self.spent = config.max_bytes, 0
        self._largest = a_round = 0 if self.most is None else bytes_of_round(config)
        for record in records:
            self.add(record)
        if self.is_spent and not records:
            raise ValueError(
                f"max-bytes = {self.most:g}: a round takes {a_round:,} bytes, expected room for "
                "one at least; raise it, or lower clients-per-round or the rank"
            )

    def add(self, record: RoundRecord) -> None:
        """Count a round."""
        taken = record["bytes-up"] + record["bytes-down"]
        self.spent += taken
        if record["round"]:  # a calibration is no measure
            self._largest = max(self._largest, taken)

    @property
    def is_spent(self) -> bool:
        """Tell whether no further round fits."""
        return self.most is not None and self.spent + self._largest > self.most

    @property
    def is_last(self) -> bool:
        """Tell whether the round that begins is the last that fits."""
        return self.most is not None and self.spent + 2 * self._largest > self.most

    def tell(self, number: int) -> None:
        """Log why that round is not held."""
        log.info("max-bytes: no room for round %d; the run ends here", number)


class MetricTarget(StopCondition):
    """End a run when its metric has reached a value (`until-metric`), and note in which round.

    Of perplexity, and of whatever is the better the lower, it is reached from above. Only rounds
    with an evaluation can tell: `eval-every` says which.
    """

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
        beyond = metric == "perplexity" and value < 1 if lower else value > 1
        if value and beyond:
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
        """Return whether the value is reached."""
        return self.round is not None

    def tell(self, number: int) -> None:  # noqa: ARG002
        """Log that the run ends."""
        log.info(
            "until-metric = %g: reached in round %d (%s %.4f); the run ends here; for more rounds "
            "set another value, or 0",
            *(self.value, self.round, self.metric, self._measured),
        )


class TimeLimit(StopCondition):
    """End a run with the round that ends at a second of its time, or later (`until-time`)."""

    def __init__(self, seconds: float, time: float) -> None:
        self.seconds, self.time = seconds, time  # 0: there is none

    def add(self, record: RoundRecord) -> None:
        """See when a round has ended."""
        self.time = record.get("time", 0.0)

    @property
    def is_spent(self) -> bool:
        """Tell whether the time is up."""
        return 0 < self.seconds <= self.time

    def tell(self, number: int) -> None:
        """Log that the run ends."""
        log.info(
            "until-time = %g: round %d ended after %.4g s; the run ends here; for more rounds set "
            "another value, or 0",
            *(self.seconds, number - 1, self.time),
        )
