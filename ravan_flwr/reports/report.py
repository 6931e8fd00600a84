"""Write a page and pictures of one run, or of several laid over each other.

Runs that differ in nothing but the seed are one line with a band.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path

from ravan_flwr.reports.chart import Chart
from ravan_flwr.reports.charts import Series, bars, heat, lines, stacks
from ravan_flwr.reports.classes import classes_of
from ravan_flwr.reports.clients import clients_chart
from ravan_flwr.reports.confusion import confusion
from ravan_flwr.reports.page import described, page_of
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.runs.history import (
    Groups,
    NoRoundError,
    RecordedRun,
    common_metric,
    group_runs,
)
from ravan_flwr.runs.lock import NAME as LOCK
from ravan_flwr.specs import LOWER_IS_BETTER

log = logging.getLogger(__name__)


def comparison_charts(groups: Groups) -> list[Chart]:
    """Draw metric and losses by round and by megabyte, as far as they were measured."""
    runs = [run for members in groups.values() for run in members]
    charts = []
    for name in dict.fromkeys((common_metric(runs), "loss")):
        if any(name in run.metrics for run in runs):
            charts += _measured(name, groups)
    if not any(run.train_loss()[0] for run in runs):
        return charts  # of private runs, whose clients tell none
    train_loss = lines(
        "train-loss",
        "Training loss by round",
        "The mean loss of the clients' own training steps in each round.",
        _series(groups, RecordedRun.train_loss),
        x="round",
        y="training loss",
    )
    return [*charts, train_loss]


def _measured(name: str, groups: Groups) -> list[Chart]:
    """Draw what the server or the clients measured, by round and by megabyte."""
    by_round = _series(groups, lambda run: run.measured(name))
    by_bytes = _series(groups, lambda run: run.measured(name, by_bytes=True))
    top = None if name in LOWER_IS_BETTER else 1.0
    return [
        lines(
            name,
            f"{name.capitalize()} by round",
            f"The {name} on examples that nobody trains on, after each round.",
            by_round,
            x="round",
            y=name,
            top=top,
        ),
        lines(
            f"{name}-by-bytes",
            f"{name.capitalize()} by megabyte sent",
            f"The same {name} against all that was sent so far, to the clients and back.",
            by_bytes,
            x="MB sent, up and down",
            y=name,
            whole=False,
            top=top,
        ),
    ]


def _series(
    groups: Groups, points: Callable[[RecordedRun], tuple[list[float], list[float]]]
) -> list[Series]:
    return [Series(name, [points(run) for run in runs]) for name, runs in groups.items()]


def run_charts(run: RecordedRun, prefix: str = "") -> list[Chart]:
    """Draw which clients took part, which heads they trained, and where the time went."""
    charts = [_participation(run, prefix)]
    norms = run.summary.get("head-norms", {}) if run.summary else {}
    times = run.heads_trained(len(next(iter(norms.values()), [])))
    layers = short_names(list(norms)) or [str(number) for number in range(len(times))]
    if times and len(times[0]) > 1:
        charts.append(
            heat(
                f"{prefix}heads",
                "How often each head was trained",
                "A head is one of the parallel parts of a layer's adapter. For each layer and "
                "head: the number of clients' replies with that head.",
                times,
                layers,
                label="replies",
            )
        )
    if norms:
        charts.append(
            heat(
                f"{prefix}norms",
                "How much each head adds",
                "The Frobenius norm of the matrix that each head adds to its layer's weight, "
                "after the last round. A LoRA counts as one head.",
                list(norms.values()),
                layers,
                label="norm",
            )
        )
    charts += clients_chart(run, prefix)
    return [*charts, _seconds(run, prefix), *_confusion(run, prefix)]


def _confusion(run: RecordedRun, prefix: str) -> list[Chart]:
    """Draw which class was taken for which, where that is known."""
    classes = classes_of(run.path, run.rounds)
    if not classes or not classes.get("confusion"):
        return []
    return [
        confusion(
            f"{prefix}confusion",
            "Which class was taken for which",
            "For each class (a row), how many of its examples were taken for each class (a "
            "column), after the last round that was evaluated. Right predictions are on the "
            "diagonal.",
            classes["confusion"],
            [one["label"] for one in classes["classes"]],
        )
    ]


_MOST_ORIGINS = 4  # named below a picture
_MOST_BARS = 100  # of clients, or of numbers of rounds


def _participation(run: RecordedRun, prefix: str) -> Chart:
    """Draw the rounds of each client; of many, how many had so many rounds."""
    rounds = Counter(
        client["partition-id"] for r in run.rounds if r["round"] for client in r["clients"]
    )
    known = rounds.keys() | {c["partition-id"] for r in run.rounds for c in r["clients"]}
    number = run.config["num-clients"]  # as nodes said, so that nothing is listed by it
    if max(number, len(known)) > _MOST_BARS:
        return _spread(rounds, max(number, len(known)), f"{prefix}participation")
    known |= set(range(number))
    return bars(
        f"{prefix}participation",
        "Rounds in which each client took part",
        "For each client, named by its partition of the data: the number of rounds in which its "
        "reply was used.",
        {str(partition): float(rounds[partition]) for partition in sorted(known)},
        x="client (partition)",
        y="rounds",
    )


def _spread(rounds: Counter[int], number: int, name: str) -> Chart:
    """Draw how many of so many clients took part in no round, in one, in two, and so on."""
    clients = Counter(rounds.values()) + Counter({0: number - len(rounds)})
    width = -(-(max(clients) + 1) // _MOST_BARS)  # numbers of rounds that share a bar
    values = {
        str(first): float(sum(clients[k] for k in range(first, first + width)))
        for first in range(0, max(clients) + 1, width)
    }
    return bars(
        name,
        "Clients by the rounds in which they took part",
        f"For each number of rounds: how many of the {number:,} clients had their reply used in so "
        "many.",
        values,
        x="rounds" if width == 1 else f"rounds, {width} to a bar",
        y="clients",
        counted=True,
    )


def _seconds(run: RecordedRun, prefix: str) -> Chart:
    parts: dict[str, list[float]] = {"training": [], "evaluation": [], "the rest": []}
    for record in run.rounds:
        train, evaluate = (record["phases"].get(phase, 0.0) for phase in ("train", "evaluate"))
        parts["training"].append(train)
        parts["evaluation"].append(evaluate)
        parts["the rest"].append(max(0.0, record["seconds"] - train - evaluate))
    return stacks(
        f"{prefix}seconds",
        "Seconds by phase",
        "How long each round took: training and waiting for the clients' replies, evaluation, "
        "and the rest, such as the checkpoint.",
        [record["round"] for record in run.rounds],
        parts,
        labels=("round", "seconds"),
    )


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


def origin(runs: Sequence[RecordedRun]) -> str:
    """Say whose a picture is: preset, method, seed and name of a run, or of the first few."""
    lines = [
        f"{run.config['preset']}, {run.config['method']}, seed {run.config['seed']}: "
        f"{run.path.absolute().name}"
        for run in runs[:_MOST_ORIGINS]
    ]
    more = len(runs) - _MOST_ORIGINS
    return "; ".join(lines) + (f"; and {more} more" if more > 0 else "")


def _runs_with_rounds(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read the runs; of several, those that have held no round are skipped, by name."""
    if len(paths) == 1:
        return [RecordedRun.read(paths[0])]
    runs = []
    for path in paths:
        begun = path.is_dir() and not (path / "config.json").is_file() and (path / LOCK).is_file()
        try:
            runs.append(RecordedRun.read(path))
        except NoRoundError:
            log.warning("skipped: %s has no finished round", path)
        except ValueError:
            if not begun:
                raise
            log.warning("skipped: %s has only begun", path)
    if not runs:
        raise NoRoundError(
            f"report: none of {len(paths)} runs has a finished round, expected at least one; run "
            "one of them longer"
        )
    return runs


def write_report(paths: Sequence[Path | str], folder: Path | str) -> Path:
    """Write `index.html` and a PNG file for each picture; return the page's path."""
    folder = Path(folder)
    runs = _runs_with_rounds([Path(path) for path in paths])
    groups = group_runs(runs)
    compared = comparison_charts(groups)
    of_runs = [
        (run, run_charts(run, f"run{number}-" if len(runs) > 1 else ""))
        for number, run in enumerate(runs, start=1)
    ]
    belonging = [described(run, charts) for run, charts in of_runs]  # before anything is drawn
    for chart in compared:
        chart.write(folder, origin(runs))
    for run, charts in of_runs:
        for chart in charts:
            chart.write(folder, origin([run]))
    page = folder / "index.html"
    # JSON can hold halves of characters, which are no text in UTF-8.
    text = page_of(runs, groups, compared, belonging).encode(errors="backslashreplace")
    write_atomically(page, text)
    return page
