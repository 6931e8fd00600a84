"""Draw runs: what several have in common over each other, and what belongs to one run alone.

Runs that differ in nothing but the seed are one line with a band.
"""

import csv
import io
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate, takewhile

from ravan_flwr.config.keys import KEYS
from ravan_flwr.reports.charts import (
    Caption,
    Chart,
    Series,
    bands,
    bars,
    confusion,
    heat,
    lines,
    stacks,
)
from ravan_flwr.reports.classes import classes_of
from ravan_flwr.reports.prediction import no_formula
from ravan_flwr.reports.time_charts import time_charts
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric
from ravan_flwr.runs.record import Spread
from ravan_flwr.tasks import NO_FRACTIONS

_MOST_BARS = 100  # of clients, or of numbers of rounds
_MOST_HEADS = int(KEYS["heads"].high)

Points = tuple[list[float], list[float]]


def comparison_charts(groups: Groups) -> list[Chart]:
    """Draw metric and losses by round, and the metric by megabyte, as far as they were measured."""
    runs = [run for members in groups.values() for run in members]
    metric = common_metric(runs)
    charts = [
        chart
        for name in dict.fromkeys((metric, "loss"))
        if any(name in run.metrics for run in runs)
        for chart in _measured(name, groups, by_bytes=name == metric)
    ]
    if not any(run.train_loss()[0] for run in runs):
        return charts  # of private runs, whose clients tell none
    about = "The mean loss of the clients' own training steps in each round."
    caption = Caption("train-loss", "Training loss by round", about)
    return [
        *charts,
        lines(caption, _series(groups, RecordedRun.train_loss), "round", "training loss"),
    ]


def _measured(name: str, groups: Groups, *, by_bytes: bool) -> list[Chart]:
    """Draw what the server or the clients measured, by round and by megabyte."""
    top, title = None if name in NO_FRACTIONS else 1.0, name.capitalize()
    about = f"The {name} on examples that no client trains on, after each round."
    by_round = _series(groups, lambda run: run.measured(name))
    drawn = [lines(Caption(name, f"{title} by round", about), by_round, "round", name, top=top)]
    if by_bytes:
        about = f"The same {name} against all that was sent so far, to the clients and back."
        caption = Caption(f"{name}-by-bytes", f"{title} by megabyte sent", about)
        series = _series(groups, lambda run: run.measured(name, by_bytes=True))
        drawn.append(lines(caption, series, "MB sent, up and down", name, whole=False, top=top))
    runs = [run for members in groups.values() for run in members]
    if by_bytes and all(run.has_time_of_devices for run in runs):
        kind = "simulated " if all(run.in_simulated_time for run in runs) else ""
        about = f"The same {name} against the time of the {kind}devices."
        caption = Caption(f"{name}-by-time", f"{title} by {kind}time", about)
        longest = max(run.rounds[-1].get("time", 0.0) for run in runs)
        unit, seconds = ("hours", 3600.0) if longest >= 3600 else ("seconds", 1.0)
        series = _series(groups, lambda run: run.by_time(name, seconds))
        drawn.append(lines(caption, series, f"{kind}{unit}", name, whole=False, top=top))
    return drawn


def _series(groups: Groups, points: Callable[[RecordedRun], Points]) -> list[Series]:
    return [Series(name, [points(run) for run in runs]) for name, runs in groups.items()]


def run_charts(run: RecordedRun, prefix: str = "") -> list[Chart]:
    """Draw what travelled, who took part, which heads were trained, and where the time went."""
    charts = [_sent(run, prefix), _participation(run, prefix), *time_charts(run, prefix)]
    norms = run.summary.get("head-norms", {}) if run.summary else {}
    known = len(next(iter(norms.values()), []))
    times = run.heads_trained(known) if _has_heads(run) else []
    layers = short_names(list(norms)) or [str(number) for number in range(len(times))]
    if times and len(times[0]) > 1:
        heads = [str(head) for head in range(len(times[0]))]
        caption = Caption(
            f"{prefix}heads",
            "How often each head was trained",
            "A head is one of the parallel parts of a layer's adapter. For each layer and head: "
            "the number of clients' replies with that head.",
        )
        charts.append(heat(caption, times, layers, heads, "head", "replies"))
    if norms:
        caption = Caption(
            f"{prefix}norms",
            "How much each head adds",
            "The Frobenius norm of the matrix that each head adds to its layer's weight, after "
            "the last round. A LoRA counts as one head.",
        )
        heads = [str(head) for head in range(known)]
        charts.append(heat(caption, list(norms.values()), layers, heads, "head", "norm"))
    return [
        *charts,
        *_spread_over_clients(run, prefix),
        _seconds(run, prefix),
        *_classes(run, prefix),
    ]


def _has_heads(run: RecordedRun) -> bool:
    """Tell whether all replies list as many layers, and heads that there may be."""
    chosen = [client["selected"] for record in run.rounds for client in record["clients"]]
    return len({*map(len, chosen)}) == 1 and all(
        0 <= head < _MOST_HEADS for layers in chosen for layer in layers for head in layer
    )


def _sent(run: RecordedRun, prefix: str) -> Chart:
    """Draw what travelled so far."""
    rounds = [record["round"] for record in run.rounds]
    up = list(accumulate(record["bytes-up"] / 1e6 for record in run.rounds))
    down = list(accumulate(record["bytes-down"] / 1e6 for record in run.rounds))
    about = "Megabytes sent so far, rejected replies and evaluations among them."
    series = [Series("by clients", [(rounds, up)]), Series("to clients", [(rounds, down)])]
    return lines(Caption(f"{prefix}sent", "Megabytes sent", about), series, "round", "MB")


def _participation(run: RecordedRun, prefix: str) -> Chart:
    """Draw the rounds of each client; of many, how many had so many rounds."""
    took_part = [
        (record["round"], client["partition-id"])
        for record in run.rounds
        for client in record["clients"]
    ]
    rounds = Counter(partition for number, partition in took_part if number)
    known = {partition for _, partition in took_part}
    number = run.config["num-clients"]  # as nodes said, so that nothing is listed by it
    name = f"{prefix}participation"
    if max(number, len(known)) > _MOST_BARS:
        return _rounds_of_many(rounds, max(number, len(known)), name)
    about = (
        "For each client, named by its partition of the data: the number of rounds in which its "
        "reply was used."
    )
    values = {str(one): float(rounds[one]) for one in sorted(known | set(range(number)))}
    caption = Caption(name, "Rounds in which each client took part", about)
    return bars(caption, values or {"": 0.0}, "client (partition)", "rounds")


def _rounds_of_many(rounds: Counter[int], number: int, name: str) -> Chart:
    """Draw how many of so many clients took part in no round, in one, in two, and so on."""
    clients = Counter(rounds.values()) + Counter({0: number - len(rounds)})
    width = -(-(max(clients) + 1) // _MOST_BARS)  # numbers of rounds that share a bar
    values = {
        str(first): float(sum(clients[k] for k in range(first, first + width)))
        for first in range(0, max(clients) + 1, width)
    }
    caption = Caption(
        name,
        "Clients by the rounds in which they took part",
        f"For each number of rounds: how many of the {number:,} clients had their reply used in so "
        "many.",
    )
    x = "rounds" if width == 1 else f"rounds, {width} to a bar"
    return bars(caption, values, x, "clients", counted=True)


def _seconds(run: RecordedRun, prefix: str) -> Chart:
    parts: dict[str, list[float]] = {"training": [], "evaluation": [], "the rest": []}
    for record in run.rounds:
        train, evaluate = (record["phases"].get(phase, 0.0) for phase in ("train", "evaluate"))
        rest = max(0.0, record["seconds"] - train - evaluate)
        for part, seconds in zip(parts.values(), (train, evaluate, rest), strict=True):
            part.append(seconds)
    about = (
        "How long each round took: training and waiting for the clients' replies, evaluation, "
        "and the rest, such as the checkpoint."
    )
    caption = Caption(f"{prefix}seconds", "Seconds by phase", about)
    return stacks(caption, [record["round"] for record in run.rounds], parts, "round", "seconds")


def _classes(run: RecordedRun, prefix: str) -> list[Chart]:
    """Draw which class was taken for which, where that is known."""
    classes = classes_of(run.path, run.rounds)
    if not classes or not classes.get("confusion"):
        return []
    caption = Caption(
        f"{prefix}confusion",
        "Which class was taken for which",
        "For each class (a row), how many of its examples were taken for each class (a column), "
        "after the last round that was evaluated. Right predictions are on the diagonal.",
    )
    counts, labels = classes["confusion"], [one["label"] for one in classes["classes"]]
    return [confusion(caption, counts, labels, confusion_csv(counts, labels))]


def confusion_csv(counts: Sequence[Sequence[int]], labels: Sequence[str]) -> bytes:
    """Write the numbers as a table for spreadsheets: rows are right, columns are predicted."""
    text = io.StringIO()
    table = csv.writer(text)
    table.writerow(["right / predicted", *map(no_formula, labels)])
    table.writerows([no_formula(label), *row] for label, row in zip(labels, counts, strict=True))
    return text.getvalue().encode(errors="backslashreplace")


def spreads(run: RecordedRun) -> tuple[str, dict[int, Spread]]:
    """Collect the spread of the run's metric over the clients, by round."""
    name = common_metric([run])
    found = {record["round"]: record["spread"] for record in run.rounds if "spread" in record}
    return name, {number: spread[name] for number, spread in found.items() if name in spread}


def _spread_over_clients(run: RecordedRun, prefix: str) -> list[Chart]:
    """Draw how a metric differs from client to client, where they evaluate."""
    name, found = spreads(run)
    if not found:
        return []
    caption = Caption(
        f"{prefix}clients",
        "How the clients differ",
        f"The {name} that each client measures on its validation split: the median of "
        "all clients, the middle half of them, and from the least to the greatest.",
    )
    ranges = {
        "all clients": [(one["min"], one["max"]) for one in found.values()],
        "the middle half": [
            (one["lower-quartile"], one["upper-quartile"]) for one in found.values()
        ],
    }
    medians = [one["median"] for one in found.values()]
    return [bands(caption, list(found), medians, ranges, "round", name)]


def short_names(names: Sequence[str]) -> list[str]:
    """Shorten dotted names by the words that all of them share at the same place."""
    words = [name.split(".") for name in names]
    if len(words) < 2:
        return list(names)
    if len({len(name) for name in words}) == 1:
        places = [i for i, there in enumerate(zip(*words, strict=True)) if len(set(there)) > 1]
        return [".".join(name[i] for i in places) for name in words]
    start = _shared(words)
    end = _shared([name[start:][::-1] for name in words])
    return [".".join(name[start : len(name) - end]) or ".".join(name) for name in words]


def _shared(words: list[list[str]]) -> int:
    """Count the words at the beginning that all have."""
    at_a_place = zip(*words, strict=False)  # as far as the shortest goes
    return sum(1 for _ in takewhile(lambda there: len(set(there)) == 1, at_a_place))
