"""Draw the charts that compare several runs, and the charts of a single run.

Runs that differ only in the seed are one line with a band.
"""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, chain
from os.path import commonprefix
from statistics import mean

import pandas as pd

from ravan_flwr.config.keys import KEYS
from ravan_flwr.results.charts import (
    Caption,
    Chart,
    Ends,
    Series,
    bars,
    heatmap,
    lines,
    min_and_max,
    panels,
)
from ravan_flwr.results.classes import read_classes
from ravan_flwr.runs.history import Curve, Groups, RecordedRun, common_metric
from ravan_flwr.tasks import is_fraction

_MAX_DEVICES = 40  # kinds of device in a chart
_MAX_HEADS = int(KEYS["heads"].high)
_MAX_TOGETHER = 6  # lines that a reader can distinguish in one picture

# The x axes of a metric, by the name in a curve: the unit, the suffix of the picture's name, the
# heading, the label of the axis, and a sentence.
_AGAINST: dict[str, tuple[float, str, str, str, str]] = {
    "round": (1, "", "by round", "round", "after each round"),
    "bytes": (
        1e6, "-by-bytes", "by megabyte sent", "MB sent, up and down",
        "against all that was sent so far, to the clients and back",
    ),
    "client-seconds": (
        1, "-by-seconds", "by seconds of the clients", "client seconds",
        "against the seconds that clients took to train so far, summed over them",
    ),
    "time": (
        1, "-by-time", "by time of the devices", "seconds of the devices",
        "against the time of the devices, simulated or real",
    ),
}  # fmt: skip


def metric_charts(
    metric: str, curves: Mapping[str, Sequence[Curve]], keys: Sequence[str], *,
    against: str = "", ends: Ends = min_and_max, bands: str = "",
) -> list[Chart]:  # fmt: skip
    """Draw a metric of the runs of each row, against each of `keys`: rounds, or a cost."""
    charts = []
    for key in keys:
        unit, suffix, heading, x, about = _AGAINST[key]
        series = [
            Series(name, [([at / unit for at in x[key]], x[metric]) for x in row if metric in x])
            for name, row in curves.items()
        ]
        if not any(line.runs for line in series):
            continue
        caption = Caption(
            f"{metric}{suffix}",
            f"{metric.capitalize()} {heading}",
            f"The {metric} on examples that no client trains on, {about}.{bands}",
        )
        top = 1.0 if is_fraction(metric) else None
        charts.append(_courses(caption, series, against, x, metric, ends, top))
    return charts


def _courses(
    caption: Caption, series: Sequence[Series], against: str, x: str, y: str,
    ends: Ends = min_and_max, top: float | None = None,
) -> Chart:  # fmt: skip
    """Draw the series in one picture; many in a panel each, with the series `against` in all."""
    if len(series) > _MAX_TOGETHER:
        return panels(caption, series, against, x, y, ends=ends)
    return lines(caption, series, x, y, integers=x == "round", ends=ends, top=top)


def comparison_charts(groups: Groups) -> list[Chart]:
    """Draw the metric and losses by round, and the metric by cost, as far as they are recorded.

    Each chart has a line for each group, so that it has one colour in all of them.
    """
    runs = [run for members in groups.values() for run in members]
    metric, charts, first = common_metric(runs), list[Chart](), next(iter(groups))
    costs = ["bytes", "time"] if all(run.has_time_of_devices for run in runs) else ["bytes"]
    for name in dict.fromkeys((metric, "loss")):
        curves = {row: [run.curve(name) for run in members] for row, members in groups.items()}
        keys = ["round", *costs] if name == metric else ["round"]
        charts += metric_charts(name, curves, keys, against=first)
    losses = [Series(row, [run.train_loss() for run in members]) for row, members in groups.items()]
    if any(rounds for line in losses for rounds, _ in line.runs):  # private runs have none
        about = "The mean loss of the clients' training steps in each round."
        caption = Caption("train-loss", "Training loss by round", about)
        charts.append(_courses(caption, losses, first, "round", "training loss"))
    return charts


def run_charts(run: RecordedRun, prefix: str = "") -> list[Chart]:
    """Draw bytes, devices, heads, per-client statistics, times and confusion."""
    charts = [
        _sent(run),
        *_devices(run),
        *_heads(run),
        *_clients(run),
        _seconds(run),
        *_confusion(run),
    ]
    return [replace(chart, name=f"{prefix}{chart.name}") for chart in charts]


def _sent(run: RecordedRun) -> Chart:
    """Draw the cumulative bytes sent."""
    rounds = [record["round"] for record in run.rounds]
    up = list(accumulate(record["bytes-up"] / 1e6 for record in run.rounds))
    down = list(accumulate(record["bytes-down"] / 1e6 for record in run.rounds))
    about = "Megabytes sent so far, with rejected replies and evaluations."
    series = [Series("by clients", [(rounds, up)]), Series("to clients", [(rounds, down)])]
    return lines(Caption("sent", "Megabytes sent", about), series, "round", "MB")


def _devices(run: RecordedRun) -> list[Chart]:
    """Draw used updates and idle time by device, if the run's time is that of devices."""
    clients = [client for r in run.rounds if r["round"] for client in r["clients"]]
    if not (run.has_time_of_devices and clients and all("span" in client for client in clients)):
        return []
    busy, devices = defaultdict[int, float](float), dict[int, str]()
    for client in clients:
        partition, (begin, end) = client["partition-id"], client["span"]
        busy[partition] += end - begin
        devices[partition] = client.get("device", f"client {partition}")
    updates = Counter(devices[client["partition-id"]] for client in clients)
    shown = sorted(updates)[:: -(-len(updates) // _MAX_DEVICES)]
    fractions = {device: 100 * updates[device] / updates.total() for device in shown}
    about = "For each kind of device: its fraction of all updates that were used."
    charts = [bars(Caption("devices", "Updates by device", about), fractions, "device", "%")]
    duration = run.rounds[-1].get("time", 0.0)
    if duration > 0:
        idle: dict[str, list[float]] = {device: [] for device in shown}
        for partition, seconds in busy.items():
            if devices[partition] in idle:
                idle[devices[partition]].append(max(0.0, 100 * (1 - seconds / duration)))
        about = (
            "For each kind of device: the fraction of the run's time in which a client worked on "
            "no update that was used, as a mean over the clients that took part."
        )
        values = {device: mean(percentages) for device, percentages in idle.items()}
        charts.append(bars(Caption("idle", "Idle time by device", about), values, "device", "%"))
    return charts


def _heads(run: RecordedRun) -> list[Chart]:
    """Draw how often each head was trained, and the norm of what it adds to its layer."""
    charts, norms = list[Chart](), run.summary.get("head-norms", {}) if run.summary else {}
    num_heads = len(next(iter(norms.values()), []))
    times = _heads_trained(run, num_heads)
    layers = short_names(list(norms)) or [str(number) for number in range(len(times))]
    if times and len(times[0]) > 1:
        caption = Caption(
            "heads",
            "How often each head was trained",
            "A head is one of the parallel parts of a layer's adapter. For each layer and head: "
            "the number of clients' replies with that head.",
        )
        heads = [str(head) for head in range(len(times[0]))]
        charts.append(heatmap(caption, times, layers, heads, "head", "replies"))
    if norms:
        caption = Caption(
            "norms",
            "How much each head adds",
            "The Frobenius norm of the matrix that each head adds to its layer's weight, after "
            "the last round. A LoRA counts as one head.",
        )
        heads = [str(head) for head in range(num_heads)]
        charts.append(heatmap(caption, list(norms.values()), layers, heads, "head", "norm"))
    return charts


def _heads_trained(run: RecordedRun, num_heads: int) -> list[list[int]]:
    """Count the replies with each head, as (layers, heads), `num_heads` heads at least.

    The list is empty if replies list different numbers of layers, or invalid numbers of heads.
    """
    replies = [client["selected"] for r in run.rounds if r["round"] for client in r["clients"]]
    if len({*map(len, replies)}) != 1:
        return []
    layers = [Counter(chain(*trained)) for trained in zip(*replies, strict=True)]
    numbers = {head for layer in layers for head in layer}
    if any(not 0 <= head < _MAX_HEADS for head in numbers):
        return []
    heads = range(max([num_heads, *(head + 1 for head in numbers)]))
    return [[layer[head] for head in heads] for layer in layers]


def _clients(run: RecordedRun) -> list[Chart]:
    """Draw the per-client statistics of a metric, if clients evaluate."""
    name = common_metric([run])
    statistics = {
        record["round"]: record["per-client"][name]
        for record in run.rounds
        if name in record.get("per-client", {})
    }
    if not statistics:
        return []
    about = f"The {name} of each client on its validation split: range and quartiles."
    caption = Caption("clients", "How the clients differ", about)
    values = pd.DataFrame(statistics.values())
    ends = ["max", "upper-quartile", "median", "lower-quartile", "min"]
    series = [Series(end, [(list(statistics), values[end].tolist())]) for end in ends]
    return [lines(caption, series, "round", name)]


def _seconds(run: RecordedRun) -> Chart:
    """Draw how long each phase of each round took."""
    rounds = [record["round"] for record in run.rounds]
    training = [record["phases"].get("train", 0.0) for record in run.rounds]
    evaluation = [record["phases"].get("evaluate", 0.0) for record in run.rounds]
    total = [record["seconds"] for record in run.rounds]
    about = (
        "How long each round took, and of that training, with waiting for the clients' replies, "
        "and evaluation. The rest is what else the server does, such as the checkpoint."
    )
    series = [
        Series("the round", [(rounds, total)]),
        Series("training", [(rounds, training)]),
        Series("evaluation", [(rounds, evaluation)]),
    ]
    return lines(Caption("seconds", "Seconds by phase", about), series, "round", "seconds")


def _confusion(run: RecordedRun) -> list[Chart]:
    """Draw the confusion matrix, if there is one."""
    classes = read_classes(run.path, run.rounds)
    if not classes or not classes.get("confusion"):
        return []
    labels = [entry["label"] for entry in classes["classes"]]
    return [confusion_chart(classes["confusion"], labels, classes.get("no-label"))]


def confusion_chart(
    counts: Sequence[Sequence[int]], labels: Sequence[str], no_label: Sequence[int] | None = None
) -> Chart:
    """Draw a confusion matrix: a row for each right class, a column for each predicted class.

    The colour is the fraction of the class's examples, so that rare classes are visible as well.
    `no_label` has the number of those for which the model wrote no label.
    """
    caption = Caption(
        "confusion",
        "Confusion matrix",
        "For each class (a row), how many of its examples were predicted as each class (a column), "
        "after the last round that was evaluated. Right predictions are on the diagonal.",
    )
    sizes = [sum(row) + n for row, n in zip(counts, no_label or [0] * len(counts), strict=True)]
    fractions = [[n / max(1, size) for n in row] for row, size in zip(counts, sizes, strict=True)]
    x, label, y = "predicted class", "fraction of the class", "right class"
    return heatmap(caption, fractions, labels, labels, x, label, y, counts=counts)


def short_names(names: Sequence[str]) -> list[str]:
    """Return dotted names without the words at both ends that all of them share."""
    start = _shared(names)
    end = _shared([name[start:][::-1] for name in names])
    return [name[start : len(name) - end] or name for name in names]


def _shared(names: Sequence[str]) -> int:
    """Return the number of letters of the leading words, with their dots, that all names share."""
    return commonprefix(names).rfind(".") + 1  # noqa: RUF071 (names are no paths)
