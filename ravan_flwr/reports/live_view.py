"""Say of a run what its live page shows: in words and numbers, all of which the page escapes."""

from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from typing import Any

from ravan_flwr.config.key_values import as_typed
from ravan_flwr.config.keys import KEYS
from ravan_flwr.reports.following import RunSnapshot
from ravan_flwr.reports.participants import people_of
from ravan_flwr.reports.plots import Plot, bar_plot, line_plot
from ravan_flwr.reports.state import now_of, rounds_of, seconds_left
from ravan_flwr.runs.console import megabytes, minutes, uploads_seen
from ravan_flwr.runs.history import RecordedRun, common_metric
from ravan_flwr.runs.samples import compared, last_samples
from ravan_flwr.specs import LOWER_IS_BETTER

MOST_REJECTED = 50  # the last ones
MOST_LAYERS = 100
MOST_HEADS = int(KEYS["heads"].high)
PHASES = ("training", "evaluation", "the rest")


def view_of(seen: RunSnapshot) -> dict[str, Any]:
    """Collect what the template shows."""
    run = RecordedRun(seen.path, seen.config, seen.rounds, None)
    rejected = [
        (r["round"], one["client"], one["reason"]) for r in run.rounds for one in r["rejected"]
    ]
    config = seen.config
    title = (
        f"{config['method']} on {config['preset']}" if {"method", "preset"} <= config.keys() else ""
    )
    return {
        "title": title or seen.path.name,
        "name": seen.path.name,
        "path": str(seen.path),
        "now": now_of(seen),
        "facts": _facts(run, seen),
        "plots": [plot for plot in _plots(run) if plot is not None],
        "heads": _heads(run),
        "samples": compared(last_samples(seen.path, run.rounds)),
        "people": people_of(seen),
        "refused": seen.status["refused"] if seen.status else [],
        "rejected": rejected[-MOST_REJECTED:][::-1],
        "rejections": len(rejected),
        "log": [(line, " WARNING " in line[:40] or " ERROR " in line[:40]) for line in seen.log],
        "settings": [(name, as_typed(value)) for name, value in config.items()],
    }


def _facts(run: RecordedRun, seen: RunSnapshot) -> dict[str, str]:
    """Give the run so far in a few numbers."""
    metric = common_metric([run])
    rounds, values = run.measured(metric)
    losses = run.train_loss()[1]
    extreme, choose = ("lowest", min) if metric in LOWER_IS_BETTER else ("highest", max)
    best = choose(range(len(values)), key=values.__getitem__, default=None)
    facts = {
        f"{metric}, last": f"{values[-1]:.4f}" if values else "-",
        f"{metric}, {extreme}": "-"
        if best is None
        else f"{values[best]:.4f}, round {rounds[best]}",
        "training loss, last": f"{losses[-1]:.4f}" if losses else "-",
        "rounds": f"{run.rounds[-1]['round'] if run.rounds else 0} of {rounds_of(seen) or '?'}",
        "time": minutes(sum(record["seconds"] for record in run.rounds)),
    }
    if run.rounds and (spent := run.rounds[-1].get("privacy")) is not None:
        facts["epsilon so far"] = f"{spent['epsilon']:.3f}"
        if "epsilon-to-server" in spent:
            facts["epsilon to the server"] = f"{spent['epsilon-to-server']:.3f}"
    if masked := uploads_seen(run.config):
        facts["uploads"] = masked
    left = seconds_left(seen)
    if left is not None:
        facts["time left, about"] = minutes(left)
    return facts | {
        "sent by clients": megabytes(sum(record["bytes-up"] for record in run.rounds)),
        "sent to clients": megabytes(sum(record["bytes-down"] for record in run.rounds)),
        "rejected replies": str(sum(len(record["rejected"]) for record in run.rounds)),
    }


def _plots(run: RecordedRun) -> Iterable[Plot | None]:
    """Work out the pictures of what has been measured so far."""
    metric = common_metric([run])
    if metric != "loss":
        yield _lines(
            run,
            metric,
            f"{metric.capitalize()} by round",
            f"The {metric} on examples that nobody trains on.",
            metric,
        )
        yield line_plot(
            f"{metric}-by-bytes",
            f"{metric.capitalize()} by megabyte sent",
            f"The same {metric} against all that was sent, to the clients and back.",
            "MB sent, up and down",
            {metric: list(zip(*run.measured(metric, by_bytes=True), strict=True))},
            whole=False,
        )
    yield _lines(
        run,
        "loss",
        "Loss by round",
        "The mean loss of the clients' own training steps, and that of the evaluation.",
        "evaluation",
    )
    yield _sent(run)
    yield _seconds(run)


def _lines(run: RecordedRun, metric: str, title: str, about: str, label: str) -> Plot | None:
    series = {label: list(zip(*run.measured(metric), strict=True))}
    if metric == "loss":
        series = {"training": list(zip(*run.train_loss(), strict=True))} | series
    return line_plot(metric, title, about, "round", series, whole=True)


def _sent(run: RecordedRun) -> Plot | None:
    """Draw what travelled so far."""

    def so_far(size: Callable[[Any], int]) -> list[tuple[float, float]]:
        totals = accumulate(size(record) / 1e6 for record in run.rounds)
        pairs = zip(run.rounds, totals, strict=True)
        return [(0, 0.0), *((record["round"], total) for record, total in pairs)]

    series = {
        "by clients": so_far(lambda record: record["bytes-up"]),
        "to clients": so_far(lambda record: record["bytes-down"]),
    }
    about = "Megabytes sent so far, rejected replies and evaluations among them."
    return line_plot("sent", "Megabytes sent", about, "round", series, whole=True)


def _seconds(run: RecordedRun) -> Plot | None:
    """Draw where the time of each round went."""
    bars = []
    for record in run.rounds:
        train, evaluate = (float(record["phases"].get(one, 0.0)) for one in ("train", "evaluate"))
        rest = max(0.0, record["seconds"] - train - evaluate)
        bars.append((record["round"], (train, evaluate, rest)))
    about = "How long each round took: training and waiting for replies, evaluation, and the rest."
    return bar_plot("seconds", "Seconds by phase", about, "round", bars, PHASES)


def _heads(run: RecordedRun) -> dict[str, Any] | None:
    """Count in how many replies each head was, layers by heads; None where there are no heads."""
    clients = [client for record in run.rounds for client in record["clients"]]
    if not all(map(_has_heads, clients)) or len({len(c["selected"]) for c in clients}) > 1:
        return None
    table = run.heads_trained()
    if not table or len(table[0]) < 2:
        return None
    most = max(max(row) for row in table) or 1
    rows = [[(count, round(count / most, 3)) for count in row] for row in table[:MOST_LAYERS]]
    return {"rows": rows, "heads": len(table[0]), "layers": len(table), "most": most}


def _has_heads(client: Mapping[str, Any]) -> bool:
    """Tell whether a client's record lists heads by layer, as a run writes them."""
    chosen = client.get("selected")
    return isinstance(chosen, list) and all(
        isinstance(layer, list) and all(type(h) is int and 0 <= h < MOST_HEADS for h in layer)
        for layer in chosen
    )
