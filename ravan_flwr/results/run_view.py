"""Return the content of a run's page: texts and numbers, all of which the page escapes."""

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from markupsafe import Markup

from ravan_flwr.config.keys import as_typed
from ravan_flwr.results.card import privacy_of
from ravan_flwr.results.charts import Chart
from ravan_flwr.results.classes import class_table, classes_of
from ravan_flwr.runs.console import megabytes, minutes, uploads_seen
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric
from ravan_flwr.runs.record import ClientRecord
from ravan_flwr.tasks import lower_is_better

LISTED_CLIENTS = 300  # clients that are listed


def picture_of(chart: Chart) -> dict[str, Any]:
    """Draw a chart for the page."""
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", chart.svg())  # which HTML does not need
    texts = {"title": chart.title, "about": chart.about, "broad": chart.broad}
    return {**texts, "svg": Markup(svg)}  # noqa: S704 (matplotlib has escaped the texts in it)


def view_of(
    run: RecordedRun, pictures: Sequence[Mapping[str, Any]] = (), *, row: str = ""
) -> dict[str, Any]:
    """Return the page's content for one run; `row` is its row in a comparison."""
    config = run.config
    row = row or config.get("method", "")
    classes = classes_of(run.path, run.rounds)
    return {
        "title": title_of(config) or run.path.name,
        "name": f"{row}, seed {config.get('seed', '?')}: {run.path.name}",
        "path": str(run.path),
        "finished": run.summary is not None,
        "collapsed": _collapsed(run),
        "facts": facts_of(run, classes),
        "pictures": pictures,
        "classes": class_table(classes) if classes else None,
        "clients": _clients(run),
        "rejected": [
            (record["round"], rejection["client"], rejection["reason"])
            for record in run.rounds
            for rejection in record["rejected"]
        ],
        "settings": list(_settings(config)),
    }


def _settings(config: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, object]]:
    """Yield the names and values of a configuration; those of its model and data one by one."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _settings(value, f"{before}{name}.")
        elif isinstance(value, list):
            yield before + name, json.dumps(value, ensure_ascii=False)
        else:
            yield before + name, as_typed(value)


def title_of(config: Mapping[str, Any]) -> str:
    """Return "METHOD on PRESET"; empty before the run has written its settings."""
    return f"{config['method']} on {config['preset']}" if "method" in config else ""


def facts_of(run: RecordedRun, classes: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the main numbers of a run."""
    metric = common_metric([run])
    summary: Mapping[str, Any] = run.summary or {}
    curve, losses = run.curve(metric), run.train_loss()[1]
    rounds, values = curve.get("round", []), curve.get(metric, [])
    extreme, choose = ("lowest", min) if lower_is_better(metric) else ("highest", max)
    best = choose(range(len(values)), key=values.__getitem__, default=0)
    last: Mapping[str, Any] = run.rounds[-1] if run.rounds else {}
    spent = last.get("privacy") or {}
    link = sum(record.get("link-bytes-estimate", 0) for record in run.rounds)
    facts = {
        f"{metric}, last": f"{values[-1]:.4f}" if values else "not evaluated",
        f"{metric}, {extreme}": f"{values[best]:.4f}, round {rounds[best]}" if values else "-",
        "training loss, last": f"{losses[-1]:.4f}" if losses else "",
        "rounds": f"{last.get('round', 0)} of {run.config.get('num-rounds', '?')}",
        "time": minutes(sum(record["seconds"] for record in run.rounds)),
        "sent by clients": megabytes(sum(record["bytes-up"] for record in run.rounds)),
        "sent to clients": megabytes(sum(record["bytes-down"] for record in run.rounds)),
        "rejected replies": str(sum(len(record["rejected"]) for record in run.rounds)),
        "uploads": uploads_seen(run.config),
    }
    if classes:
        facts["macro-F1, last"] = f"{classes['macro-f1']:.4f}"
    if last and run.in_simulated_time:
        facts["simulated time"] = f"{last['time']:.4g} s"
    if link:
        facts["sent over the network, estimated"] = megabytes(link)
    if summary and (until := run.config.get("until-metric")):
        reached = summary.get("reached")
        outcome = "not reached" if reached is None else f"reached in round {reached}"
        facts["until-metric"] = f"{until:g}, {outcome}"
    if spent:
        facts["privacy"] = privacy_of(spent)
    if "trainable-parameters" in summary:
        facts["trained parameters"] = f"{summary['trainable-parameters']:,}"
    return {name: value for name, value in facts.items() if value}


def _collapsed(run: RecordedRun) -> str:
    """Describe the rounds in which the evaluation collapsed; empty if there are none."""
    rounds = [record for record in run.rounds if "collapsed" in record]
    if not rounds:
        return ""
    numbers = ", ".join(str(record["round"]) for record in rounds)
    return (
        f"The evaluation collapsed in round{'s' * (len(rounds) > 1)} {numbers}. Round "
        f"{rounds[-1]['round']}: {rounds[-1]['collapsed']}. The likely cause is a learning rate "
        f"that is too high (here {run.config.get('learning-rate')}); start again with a lower one."
    )


def comparison_of(groups: Groups) -> dict[str, Any]:
    """Return a table with a row for each line of the charts."""
    metric = common_metric([run for runs in groups.values() for run in runs])
    heads = ["", "runs", "rounds", f"{metric}, mean", "least to greatest", "sent, up and down"]
    return {"heads": heads, "rows": [_row(name, runs, metric) for name, runs in groups.items()]}


def _row(name: str, runs: Sequence[RecordedRun], metric: str) -> tuple[object, ...]:
    """Return the row of runs that differ only in the seed."""
    values = [value for run in runs for value in run.curve(metric).get(metric, [])[-1:]]
    mean = f"{sum(values) / len(values):.4f}" if values else "not evaluated"
    extremes = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
    sent = sum(r["bytes-up"] + r["bytes-down"] for run in runs for r in run.rounds) / len(runs)
    rounds = ", ".join(map(str, sorted({run.rounds[-1]["round"] for run in runs})))
    if not all(run.summary for run in runs):
        rounds += ", unfinished"
    if number := sum("collapsed" in run.rounds[-1] for run in runs):
        rounds += f", {number} collapsed at the end"
    return name, len(runs), rounds, mean, extremes, f"{sent / 1e6:.2f} MB"


def _clients(run: RecordedRun) -> dict[str, Any]:
    """List the clients by partition; of too many, those with a rejection, then the latest ones."""
    replies: dict[int, list[tuple[int, ClientRecord]]] = {}
    rejected = defaultdict[str, list[str]](list)
    for record in run.rounds:
        for client in record["clients"]:
            replies.setdefault(client["partition-id"], []).append((record["round"], client))
        for reply in record["rejected"]:
            rejected[reply["client"]].append(f"round {record['round']}: {reply['reason']}")
    rows = [
        {
            "partition": number,
            "rejected": len(rejected[f"partition {number}"]),
            "reason": "".join(rejected[f"partition {number}"][-1:]),  # of the last rejection
            "rounds": len(history),  # in which its reply was used
            "last_round": history[-1][0],
            "bytes_up": sum(client["bytes-up"] for _, client in history),
            "bytes_down": sum(client["bytes-down"] for _, client in history),
            **_client_cells(history[-1][1]),
        }
        for number, history in replies.items()
    ]
    chosen = sorted(
        rows,
        key=lambda client: (not client["rejected"], -client["last_round"], client["partition"]),
    )[:LISTED_CLIENTS]
    return {
        "listed": sorted(chosen, key=lambda client: client["partition"]),
        "more": len(rows) - len(chosen),
    }


def _client_cells(reply: ClientRecord) -> dict[str, Any]:
    """Return the cells of a client's last reply."""
    seconds = f"{reply['seconds']:.1f}" if "seconds" in reply else ""
    if "device" in reply and "span" in reply:  # a simulated device, with simulated seconds
        begin, end = reply["span"]
        seconds = f"{end - begin:.3g}"
    return {
        "device": reply.get("device", ""),
        "budget": f"{reply['budget-fraction']:g}",
        "examples": f"{reply['examples']:,}",
        "heads": f"{reply['heads']:g}",
        "seconds": seconds,
    }
