"""Find, in the evaluations of a run, the best round so far, and a collapse.

A round has collapsed if
- its metric is below half of the best so far and by at least 0.1 lower (not of a metric that is
  better the lower, such as perplexity),
- its loss is above twice that of the first evaluation,
- the examples of all other classes are taken for one class, or
- its loss is above ln(classes), that of equal probabilities for all classes.

A network that has hardly trained can look like the last two: the first two rounds are not judged by
them, and the first evaluation only if it is the last. The likely cause is a learning rate that is
too high, another a false reply, so that people are told and nothing is undone; the checkpoint of
the best round is kept (checkpoint.py), and `resume=RUN@N` goes back to it.
"""

import math
from collections.abc import Sequence

from ravan_flwr.runs.record import Metrics, RoundRecord
from ravan_flwr.tasks import lower_is_better, sign_of
from ravan_flwr.tasks.tally import OTHER, Tally

FALL, LEAST_FALL, RISE = 0.5, 0.1, 2.0
HARDLY_TRAINED = 2  # rounds


def merit(metrics: Metrics, metric: str) -> float:
    """Return a metric such that larger is better."""
    return sign_of(metric) * float(metrics[metric])


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
    if metric not in now["metrics"]:
        return None
    measured = [r for r in records if metric in r["metrics"]]
    if reason := _fallen(measured, now["metrics"], metric):
        return reason
    if now["round"] <= HARDLY_TRAINED or not (measured or last):
        return None
    return _worthless(now["metrics"], labels, tally)


def _fallen(earlier: Sequence[RoundRecord], now: Metrics, metric: str) -> str | None:
    """Say how an evaluation is worse than earlier ones."""
    if earlier and not lower_is_better(metric):
        value, most = now[metric], max(r["metrics"][metric] for r in earlier)
        if value < FALL * most and most - value >= LEAST_FALL:
            best = best_round(earlier, metric)
            return f"{metric} fell to {value:.4g}, below half of {most:.4g} in round {best}"
    losses = [(r["metrics"]["loss"], r["round"]) for r in earlier if "loss" in r["metrics"]]
    if losses and now.get("loss", 0.0) > RISE * losses[0][0]:
        first, number = losses[0]
        return f"loss rose to {now['loss']:.4g}, above twice {first:.4g} in round {number}"
    return None


def _worthless(now: Metrics, labels: Sequence[str], tally: Tally | None) -> str | None:
    """Say how an evaluation is no better than answers without a look at the examples."""
    if tally is not None and (label := tally.fallen_on()) is not None:
        name = "no label" if label == OTHER else repr(labels[label])
        return f"{tally.predicted(label) / len(tally):.1%} of predictions are {name}"
    if labels and now.get("loss", 0.0) > math.log(len(labels)):
        chance = f"{math.log(len(labels)):.4g} of equal probabilities for {len(labels)} classes"
        return f"loss is {now['loss']:.4g}, above the {chance}"
    return None
