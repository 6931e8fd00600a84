"""Find, in the evaluations of a run, the best round so far, and a collapse.

A round has collapsed if
- its metric is below half of the best so far and by at least 0.1 lower (not of a metric that is
  better the lower, such as perplexity), or
- its loss is above twice that of the first evaluation, or above ln(classes), the loss of equal
  probabilities for all classes, or
- the examples of all other classes are taken for one class.

A network that has hardly trained can look like that, too: the first evaluation is judged only if
it is the last. The likely cause is a learning rate that is too high, another a false reply, so
that people are told and nothing is undone; the checkpoint of the best round is kept
(checkpoint.py), and `resume=RUN@N` goes back to it.
"""

import math
from collections.abc import Sequence

from ravan_flwr.runs.record import Metrics, RoundRecord
from ravan_flwr.specs import LOWER_IS_BETTER
from ravan_flwr.tasks.tally import OTHER, Tally

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


def collapse(
    records: Sequence[RoundRecord],
    now: RoundRecord,
    metric: str,
    labels: Sequence[str] = (),
    tally: Tally | None = None,
    *,
    last: bool = False,
) -> str | None:
    """Say how a round's evaluation has collapsed, given those before it; None if it has not.

    `labels` are the classes of a classification, and `tally` what was predicted, where that is
    known.
    """
    measured = [r for r in records if metric in r["metrics"]]
    if metric not in now["metrics"] or not (measured or last):
        return None
    value, loss = now["metrics"][metric], now["metrics"].get("loss", 0.0)
    if measured:
        most = max(r["metrics"][metric] for r in measured)
        if metric not in LOWER_IS_BETTER and value < FALL * most and most - value >= LEAST_FALL:
            best = best_round(records, metric)
            return f"{metric} fell to {value:.4g}, below half of {most:.4g} in round {best}"
    losses = [(r["metrics"]["loss"], r["round"]) for r in records if "loss" in r["metrics"]]
    if losses and loss > RISE * losses[0][0]:
        first, number = losses[0]
        return f"loss rose to {loss:.4g}, above twice {first:.4g} in round {number}"
    if tally is not None and (one := tally.fallen_on()) is not None:
        name = "no label" if one == OTHER else repr(labels[one])
        return f"{tally.predicted(one) / len(tally):.1%} of predictions are {name}"
    if labels and loss > math.log(len(labels)):
        chance = f"{math.log(len(labels)):.4g} of equal probabilities for {len(labels)} classes"
        return f"loss is {loss:.4g}, above the {chance}"
    return None
