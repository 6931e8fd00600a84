"""Conditions that stop a run before its last round: metric reached, bytes or time used up.

They depend only on the records of earlier rounds. The privacy budget is in privacy_budget.py.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from ravan_flwr.config.run_config import Config
from ravan_flwr.runs.collapse_detection import merit
from ravan_flwr.runs.record import RoundRecord
from ravan_flwr.tasks import lower_is_better
from ravan_flwr.training.cost import bytes_of_round

_planned = lru_cache(maxsize=1)(bytes_of_round)


def check_limits(config: Config, metric: str, records: Sequence[RoundRecord]) -> None:
    """Raise ValueError if the metric cannot reach its target, or `max-bytes` allows no round."""
    value, lower = config.until_metric, lower_is_better(metric)
    beyond = metric == "perplexity" and value < 1 if lower else value > 1
    if value and beyond:
        expected = "1 or more, since none is lower" if lower else "a fraction, 1 at most"
        hint = f"; write {value / 100:g}?" if not lower and value <= 100 else ""
        raise ValueError(
            f"until-metric = {value:g}: the metric is {metric}, expected {expected}; change it, "
            f"or leave it out{hint}"
        )
    if not records and exceeds_max_bytes(config, records):
        raise ValueError(
            f"max-bytes = {config.max_bytes:g}: a round takes {_planned(config):,} bytes, expected "
            "room for one at least; raise it, or lower clients-per-round or the rank"
        )


def reached(config: Config, metric: str, records: Iterable[RoundRecord]) -> RoundRecord | None:
    """Return the first round in which the metric reached `until-metric`; None if there is none.

    A metric that is better if lower, such as perplexity, reaches the value from above. Only rounds
    with an evaluation count (`eval-every`).
    """
    if not config.until_metric:
        return None
    target = merit({metric: config.until_metric}, metric)
    measured = (record for record in records if metric in record["metrics"])
    return next((record for record in measured if merit(record["metrics"], metric) >= target), None)


def exceeds_max_bytes(config: Config, records: Iterable[RoundRecord], rounds: int = 1) -> bool:
    """Return whether `rounds` further rounds would exceed the run's bytes (`max-bytes`).

    All messages and replies of training and evaluation count, as in the records. The delivery of
    the result (`deliver=true`) does not: the number of devices that will take it is unknown. The
    next round is assumed as large as the largest so far, or as planned if there is none yet.
    """
    if config.max_bytes is None:
        return False
    traffic = {record["round"]: record["bytes-up"] + record["bytes-down"] for record in records}
    measures = (traffic[number] for number in traffic if number)  # not a calibration's
    return sum(traffic.values()) + rounds * max([_planned(config), *measures]) > config.max_bytes


def stop_reason(config: Config, metric: str, records: Sequence[RoundRecord], number: int) -> str:
    """Return why the run stops before a round of that number; "" if it continues."""
    hint = "the run ends here; for more rounds set another value, or 0"
    if (last := reached(config, metric, records)) is not None:
        return (
            f"until-metric = {config.until_metric:g}: reached in round {last['round']} "
            f"({metric} {last['metrics'][metric]:.4f}); {hint}"
        )
    if exceeds_max_bytes(config, records):
        return f"max-bytes: no room for round {number}; the run ends here"
    time = records[-1].get("time", 0.0) if records else 0.0
    if 0 < config.until_time <= time:
        ended = f"round {number - 1} ended after {time:.4g} s"
        return f"until-time = {config.until_time:g}: {ended}; {hint}"
    return ""
