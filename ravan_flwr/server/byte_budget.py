"""Keep a run within its bytes (`max-bytes`): the round that no other fits after is the last.

Counted is what a round's record counts: every message and every reply, of training and of
evaluations. What devices are sent at the end (`deliver=true`) is not, since nobody knows before
how many will take it. How much the next round takes is known by the largest so far, or, before
there is one, by its size in the plan.
"""

from collections.abc import Iterable
from logging import getLogger

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.training.plan import bytes_of_round

log = getLogger(__name__)


class ByteBudget:
    """Say whether a further round fits."""

    def __init__(self, most: float | None, a_round: int, records: Iterable[RoundRecord]) -> None:
        self.most, self.spent, self._largest = most, 0, a_round
        for record in records:
            self.add(record)

    @classmethod
    def of(cls, config: Config, records: Iterable[RoundRecord]) -> "ByteBudget":
        """Make a run's; ValueError where not one round of a new run fits."""
        most, records = config.max_bytes, list(records)
        a_round = 0 if most is None else bytes_of_round(config)
        allowance = cls(most, a_round, records)
        if allowance.is_spent and not records:
            raise ValueError(
                f"max-bytes = {most:g}: a round takes {a_round:,} bytes, expected room for one at "
                "least; raise it, or lower clients-per-round or the rank"
            )
        return allowance

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
