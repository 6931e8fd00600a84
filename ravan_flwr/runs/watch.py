"""Find, in the evaluations of a run, the best round so far, and a collapse.

A round has collapsed if its metric is below half of the best so far and by at least 0.1 lower (of
one that is better the lower, such as perplexity: only the loss tells), or if its loss is above
twice that of the first evaluation: worse than hardly trained. A learning
rate can be the cause as well as a false reply, so that people are told and nothing is undone; the
checkpoint of the best round is kept (checkpoint.py), and `resume=RUN@N` goes back to it.
"""

from collections.abc import Sequence

from ravan_flwr.runs.record import Metrics, RoundRecord
from ravan_flwr.specs import LOWER_IS_BETTER

FALL, LEAST_FALL, RISE = 0.5, 0.1, 2.0


def merit(metrics: Metrics, metric: str) -> float:
    """Return a metric such that larger is better."""
    value = float(metrics[metric])
    return -value if metric in LOWER_IS_BETTER else value


def best_round(records: Sequence[RoundRecord], metric: str) -> int | None:
    """Find the round with the best metric, the first of equals; None if none was measured."""
    measured = [record for record in records if metric in record["metrics"]]
    if not measured:
        return None
    return int(max(measured, key=lambda record: merit(record["metrics"], metric))["round"])


def collapse(records: Sequence[RoundRecord], now: RoundRecord, metric: str) -> str | None:
    """Say how a round's evaluation has collapsed, given those before it; None if it has not."""
    best = best_round(records, metric)
    if best is None or metric not in now["metrics"]:
        return None
    most = max(r["metrics"][metric] for r in records if metric in r["metrics"])
    value = now["metrics"][metric]
    if metric not in LOWER_IS_BETTER and value < FALL * most and most - value >= LEAST_FALL:
        return f"{metric} fell to {value:.4g}, below half of {most:.4g} in round {best}"
    losses = [(r["metrics"]["loss"], r["round"]) for r in records if "loss" in r["metrics"]]
    if losses and now["metrics"].get("loss", 0.0) > RISE * losses[0][0]:
        first, number = losses[0]
        loss = now["metrics"]["loss"]
        return f"loss rose to {loss:.4g}, above twice {first:.4g} in round {number}"
    return None
