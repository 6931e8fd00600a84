"""Find the best round so far in a run's evaluations, and detect a collapse.

A round has collapsed if
- its metric is below half of the best so far, and at least 0.1 below it (not checked for metrics
  that are better when lower, such as perplexity),
- its loss is above twice that of the first evaluation,
- at least 99 % of the examples of all other classes are predicted as one class, or
- its loss is above ln(classes), the loss of equal probabilities for all classes.

A hardly trained network can meet the last two conditions. They do not apply to the first two
rounds, and apply to the first evaluation only if it is the last. The likely cause of a collapse is
a learning rate that is too high; a false reply is another. A collapse is logged, and nothing is
undone. The checkpoint of the best round is kept (checkpoint.py): `resume=RUN@N` goes back to it.
"""

import math
from collections.abc import Sequence

from ravan_flwr.runs.record import Metrics, RoundRecord
from ravan_flwr.tasks import get_sign, lower_is_better
from ravan_flwr.tasks.tally import OTHER, Tally

METRIC_FACTOR, MIN_DROP, LOSS_FACTOR = 0.5, 0.1, 2.0
WARM_UP = 2  # rounds


def merit(metrics: Metrics, metric: str) -> float:
    """Return a metric with its sign such that larger is better."""
    return get_sign(metric) * float(metrics[metric])


def best_round(records: Sequence[RoundRecord], metric: str) -> int | None:
    """Return the round with the best metric, the first of equals; None without an evaluation."""
    measured = [record for record in records if metric in record["metrics"]]
    if not measured:
        return None
    return int(max(measured, key=lambda record: merit(record["metrics"], metric))["round"])


def collapse_reason(
    records: Sequence[RoundRecord],
    now: RoundRecord,
    metric: str,
    labels: Sequence[str] = (),
    tally: Tally | None = None,
    *,
    last: bool = False,
) -> str | None:
    """Return why a round's evaluation has collapsed, given earlier rounds; None if it has not.

    `labels` are the classes of a classification. `tally` has the predictions, where they are known.
    """
    if metric not in now["metrics"]:
        return None
    measured = [r for r in records if metric in r["metrics"]]
    if reason := _decline(measured, now["metrics"], metric):
        return reason
    if now["round"] <= WARM_UP or not (measured or last):
        return None
    return _at_chance(now["metrics"], labels, tally)


def _decline(earlier: Sequence[RoundRecord], now: Metrics, metric: str) -> str | None:
    """Return why an evaluation is far worse than earlier ones; None if it is not."""
    if earlier and not lower_is_better(metric):
        value, best_value = now[metric], max(r["metrics"][metric] for r in earlier)
        if value < METRIC_FACTOR * best_value and best_value - value >= MIN_DROP:
            best = best_round(earlier, metric)
            return f"{metric} fell to {value:.4g}, below half of {best_value:.4g} in round {best}"
    losses = [(r["metrics"]["loss"], r["round"]) for r in earlier if "loss" in r["metrics"]]
    if losses and now.get("loss", 0.0) > LOSS_FACTOR * losses[0][0]:
        first, number = losses[0]
        return f"loss rose to {now['loss']:.4g}, above twice {first:.4g} in round {number}"
    return None


def _at_chance(now: Metrics, labels: Sequence[str], tally: Tally | None) -> str | None:
    """Return why an evaluation is no better than constant predictions; None if it is better."""
    if tally is not None and (label := tally.collapsed_label()) is not None:
        name = "no label" if label == OTHER else repr(labels[label])
        return f"{tally.predicted(label) / len(tally):.1%} of predictions are {name}"
    if labels and now.get("loss", 0.0) > math.log(len(labels)):
        chance = f"{math.log(len(labels)):.4g} of equal probabilities for {len(labels)} classes"
        return f"loss is {now['loss']:.4g}, above the {chance}"
    return None
