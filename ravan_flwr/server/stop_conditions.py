"""End a run in good order before its last round: at a value reached, with bytes or time spent.

All of it follows from the records of the rounds so far. What a private run may spend is in
privacy_budget.py.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.collapse_detection import merit
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.tasks import lower_is_better
from ravan_flwr.training.plan import bytes_of_round

_planned = lru_cache(maxsize=1)(bytes_of_round)


def check_limits(config: Config, metric: str, records: Sequence[RoundRecord]) -> None:
    """Raise ValueError for a value that the metric cannot reach, or room for no round at all."""
    value, lower = config.until_metric, lower_is_better(metric)
    beyond = metric == "perplexity" and value < 1 if lower else value > 1
    if value and beyond:
        expected = "1 or more, since none is lower" if lower else "a share, 1 at most"
        hint = f"; write {value / 100:g}?" if not lower and value <= 100 else ""
        raise ValueError(
            f"until-metric = {value:g}: the metric is {metric}, expected {expected}; correct it, "
            f"or leave it out{hint}"
        )
    if not records and no_room(config, records):
        raise ValueError(
            f"max-bytes = {config.max_bytes:g}: a round takes {_planned(config):,} bytes, expected "
            "room for one at least; raise it, or lower clients-per-round or the rank"
        )


def reached(config: Config, metric: str, records: Iterable[RoundRecord]) -> RoundRecord | None:
    """Return the first round in which the metric has its value (`until-metric`); None if in none.

    Of perplexity, and of whatever is the better the lower, it is reached from above. Only rounds
    with an evaluation can tell: `eval-every` says which.
    """
    if not config.until_metric:
        return None
    least = merit({metric: config.until_metric}, metric)
    measured = (record for record in records if metric in record["metrics"])
    return next((record for record in measured if merit(record["metrics"], metric) >= least), None)


def no_room(config: Config, records: Iterable[RoundRecord], rounds: int = 1) -> bool:
    """Tell whether so many further rounds exceed the bytes of a run (`max-bytes`).

    Counted is what a round's record counts: every message and every reply, of training and of
    evaluations. What devices are sent at the end (`deliver=true`) is not, since nobody knows before
    how many will take it. The next round takes as much as the largest so far, or, before there is
    one, as the plan says.
    """
    if config.max_bytes is None:
        return False
    traffic = {record["round"]: record["bytes-up"] + record["bytes-down"] for record in records}
    measures = (traffic[number] for number in traffic if number)  # a calibration is none
    return sum(traffic.values()) + rounds * max([_planned(config), *measures]) > config.max_bytes


def why_over(config: Config, metric: str, records: Sequence[RoundRecord], number: int) -> str:
    """Say why a round of that number is not held after these records; "" if it is."""
    hint = "the run ends here; for more rounds set another value, or 0"
    if (last := reached(config, metric, records)) is not None:
        return (
            f"until-metric = {config.until_metric:g}: reached in round {last['round']} "
            f"({metric} {last['metrics'][metric]:.4f}); {hint}"
        )
    if no_room(config, records):
        return f"max-bytes: no room for round {number}; the run ends here"
    time = records[-1].get("time", 0.0) if records else 0.0
    if 0 < config.until_time <= time:
        ended = f"round {number - 1} ended after {time:.4g} s"
        return f"until-time = {config.until_time:g}: {ended}; {hint}"
    return ""
