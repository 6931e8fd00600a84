"""A page and pictures of one run, or of several laid over each other.

Runs that differ in nothing but the seed are one line with a band.
"""

from collections.abc import Callable, Sequence
from pathlib import Path

from ravan_flwr.results.charts import Chart, Series, bars, heat, lines, stacks
from ravan_flwr.results.page import page_of
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric, group_runs


def comparison_charts(groups: Groups) -> list[Chart]:
    """Metric and losses by round and by megabyte, as far as they were measured."""
    metric = common_metric([run for runs in groups.values() for run in runs])

    def series(points: Callable[..., tuple[list[float], list[float]]]) -> list[Series]:
        return [Series(name, [points(run) for run in runs]) for name, runs in groups.items()]

    charts = []
    for name in dict.fromkeys((metric, "loss")):
        what = f"{name} on the examples held for evaluation"
        if not any(name in run.metrics for runs in groups.values() for run in runs):
            continue
        by_round = series(lambda run, name=name: run.measured(name))
        by_bytes = series(lambda run, name=name: run.measured(name, by_bytes=True))
        charts += [
            lines(
                name, f"{name.capitalize()} by round", f"{what}, after each round", by_round,
                "round", name,
            ),
            lines(
                f"{name}-by-bytes", f"{name.capitalize()} by megabyte sent",
                f"{what}, against all bytes sent so far, up and down", by_bytes,
                "MB sent, up and down", name, whole=False,
            ),
        ]  # fmt: skip
    charts.append(
        lines(
            "train-loss", "Training loss by round",
            "the mean loss of the clients' local steps in each round",
            series(RecordedRun.train_loss), "round", "training loss",
        )
    )  # fmt: skip
    return charts


def run_charts(run: RecordedRun, prefix: str = "") -> list[Chart]:
    """Who took part, which heads trained, what they became, and where the time went."""
    charts = [_participation(run, prefix)]
    norms = run.summary.get("head-norms", {}) if run.summary else {}
    times = _heads_trained(run, len(next(iter(norms.values()), [])))
    layers = [_short(name) for name in norms] or [str(number) for number in range(len(times))]
    if times and len(times[0]) > 1:
        charts.append(
            heat(
                f"{prefix}heads", "How often each head was trained",
                "for each layer and head, in how many replies it was", times, layers, "replies",
            )
        )  # fmt: skip
    if norms:
        charts.append(
            heat(
                f"{prefix}norms", "The norm of what each head adds",
                "for each layer and head, the Frobenius norm of its part of the delta-weight",
                list(norms.values()), layers, "norm",
            )
        )  # fmt: skip
    charts.append(_seconds(run, prefix))
    return charts


_MOST_BARS = 1000  # of clients that never took part: their number is what nodes said


def _participation(run: RecordedRun, prefix: str) -> Chart:
    took_part = {c["partition-id"] for r in run.rounds for c in r["clients"]}
    known = took_part | set(range(min(run.config["num-clients"], _MOST_BARS)))
    counts = {str(partition): 0.0 for partition in sorted(known)}
    for record in run.rounds:
        for client in record["clients"] if record["round"] else []:
            counts[str(client["partition-id"])] += 1
    return bars(
        f"{prefix}participation", "Rounds in which each client took part",
        "for each client, the number of rounds in which its reply was used",
        counts, "client (partition)", "rounds",
    )  # fmt: skip


def _heads_trained(run: RecordedRun, known: int) -> list[list[int]]:
    """Layers by heads, of which so many are known: in how many replies each head was."""
    replies = [client["selected"] for r in run.rounds if r["round"] for client in r["clients"]]
    if not replies:
        return []
    chosen = [head + 1 for reply in replies for layer in reply for head in layer]
    heads = max([known, *chosen])
    table = [[0] * heads for _ in replies[0]]
    for reply in replies:
        for row, trained in zip(table, reply, strict=True):
            for head in trained:
                row[head] += 1
    return table


def _seconds(run: RecordedRun, prefix: str) -> Chart:
    parts: dict[str, list[float]] = {"training": [], "evaluation": [], "the rest": []}
    for record in run.rounds:
        train, evaluate = (record["phases"].get(phase, 0.0) for phase in ("train", "evaluate"))
        parts["training"].append(train)
        parts["evaluation"].append(evaluate)
        parts["the rest"].append(max(0.0, record["seconds"] - train - evaluate))
    return stacks(
        f"{prefix}seconds", "Seconds by phase",
        "the wall time of each round: waiting for replies, evaluating, everything else",
        [record["round"] for record in run.rounds], parts, ("round", "seconds"),
    )  # fmt: skip


def _short(name: str) -> str:
    """A layer's name without what all of them share."""
    return name.removeprefix("vit.").replace("layers.", "").replace("attention.", "")


def write_report(paths: Sequence[Path | str], folder: Path | str) -> Path:
    """Write `index.html` and a PNG for each picture; the page's path."""
    folder = Path(folder)
    runs = [RecordedRun.read(path) for path in map(Path, paths)]
    groups = group_runs(runs)
    compared = comparison_charts(groups)
    of_runs = [
        (run, run_charts(run, f"run{number}-" if len(runs) > 1 else ""))
        for number, run in enumerate(runs, start=1)
    ]
    for chart in [*compared, *(chart for _, charts in of_runs for chart in charts)]:
        write_atomically(folder / f"{chart.name}.png", chart.png())
    page = folder / "index.html"
    write_atomically(page, page_of(groups, compared, of_runs).encode())
    return page
