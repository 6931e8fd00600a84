"""Write the report of one run, or of several in the same charts: a page and a PNG of each picture.

The page is one file that needs no other and no script, light or dark as its reader's browser.
"""

import html
import json
import logging
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ravan_flwr.config.keys import as_typed
from ravan_flwr.files import write_atomically
from ravan_flwr.results.card import describe_privacy
from ravan_flwr.results.charts import Chart
from ravan_flwr.results.classes import class_table, read_classes
from ravan_flwr.results.run_charts import comparison_charts, run_charts
from ravan_flwr.runs.console import megabytes, minutes, uploads_seen
from ravan_flwr.runs.history import Groups, NoRoundError, RecordedRun, common_metric, group_runs
from ravan_flwr.runs.record import ClientRecord
from ravan_flwr.tasks import lower_is_better

log = logging.getLogger(__name__)

# Reasons, devices and versions come from clients, which are not trusted: everything is escaped that
# is not marked as HTML here.
_ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)
_ENVIRONMENT.globals["megabytes"] = megabytes
# HTML needs no namespaces. Matplotlib has escaped the texts in it.
_ENVIRONMENT.filters["inline"] = lambda svg: Markup(re.sub(r' xmlns(:xlink)?="[^"]*"', "", svg))  # noqa: S704
_STYLE, _PAGE = (
    yaml.safe_load(Path(__file__).with_name("page.yaml").read_text(encoding="utf-8"))[part]
    for part in ("style", "page")
)
_TEMPLATE = _ENVIRONMENT.from_string(_PAGE)
LISTED_CLIENTS = 300  # clients that are listed


def write_report(
    paths: Sequence[Path | str] | Path | str, folder: Path | str, *, spectrum: bool = False
) -> Path:
    """Write `index.html` and a PNG file for each picture; return the page's path.

    Pictures of an earlier report in the folder are removed. With `spectrum` the page also has the
    singular values of the runs' delta-weights.
    """
    folder, paths = Path(folder), [paths] if isinstance(paths, str | Path) else paths
    runs = _runs_with_rounds([Path(path) for path in paths])
    groups = group_runs(runs)
    several = len(runs) > 1
    compared = comparison_charts(groups)
    if spectrum:
        from ravan_flwr.results.spectrum import charts_of_runs  # noqa: PLC0415 (it imports torch)

        compared += charts_of_runs([run.path for run in runs])
    charts = [run_charts(run, f"run{n}-" if several else "") for n, run in enumerate(runs, start=1)]
    rows = {run.path: row for row, members in groups.items() for run in members}
    views = [describe_run(run, row=rows[run.path]) for run in runs]  # before anything is drawn
    page = folder / "index.html"
    earlier = _files_beside(page)
    written = [path for chart in chain(compared, *charts) for path in chart.write(folder)]
    for path in earlier.difference(written):
        path.unlink(missing_ok=True)
    for view, group in zip(views, charts, strict=True):
        view["pictures"] = group if several else [*compared, *group]
    title = ", ".join(dict.fromkeys(make_title(run.config) for run in runs))
    comparison = None
    if several:
        comparison = compare_groups(groups) | {"pictures": compared}
    files = [path.name for path in written]
    write_atomically(page, render(views, title, comparison=comparison, files=files))
    return page


def _files_beside(page: Path) -> set[Path]:
    """Return the pictures and tables that an earlier report wrote beside its page."""
    text = page.read_text(encoding="utf-8", errors="replace") if page.is_file() else ""
    found = re.search(r'<meta name="files" content="([^"]*)">', text)
    names = html.unescape(found[1]).split("/") if found else []
    return {page.with_name(name) for name in names if name.endswith((".png", ".csv"))}


def _runs_with_rounds(paths: Sequence[Path]) -> list[RecordedRun]:
    """Read the runs; of several, skip reports, and by name those without a finished round."""
    runs = []
    for path in paths:
        is_report = (path / "index.html").is_file() and not (path / "config.json").is_file()
        if is_report and len(paths) > 1:  # of an earlier `report runs/*` with its output in runs/
            continue
        try:
            runs.append(RecordedRun.read(path))
        except NoRoundError as error:
            if len(paths) == 1:
                raise
            log.warning("skipped: %s", error)
    if not runs:
        raise NoRoundError(
            f"report: none of {len(paths)} runs has a finished round, expected at least one; run "
            "one of them longer"
        )
    return runs


def render(
    runs: Sequence[Mapping[str, Any]], title: str, *, comparison: Mapping[str, Any] | None = None,
    files: Sequence[str] = (),
) -> bytes:  # fmt: skip
    """Return the HTML page, which names the files beside it."""
    page = _TEMPLATE.render(
        runs=runs, title=title, comparison=comparison, files=files,
        style=Markup(_STYLE),  # noqa: S704 (a constant)
    )  # fmt: skip
    # JSON can contain lone surrogates, which UTF-8 cannot encode.
    return page.lstrip().encode(errors="backslashreplace")


def describe_run(
    run: RecordedRun, pictures: Sequence[Chart] = (), *, row: str = ""
) -> dict[str, Any]:
    """Return the page's content for one run; `row` is its row in a comparison."""
    config = run.config
    row = row or config.get("method", "")
    classes = read_classes(run.path, run.rounds)
    return {
        "title": make_title(config) or run.path.name,
        "name": f"{row}, seed {config.get('seed', '?')}: {run.path.name}",
        "path": str(run.path),
        "finished": run.summary is not None,
        "collapsed": _collapsed(run),
        "facts": collect_facts(run, classes),
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


def make_title(config: Mapping[str, Any]) -> str:
    """Return "METHOD on PRESET"; empty before the run has written its settings."""
    return f"{config['method']} on {config['preset']}" if "method" in config else ""


def collect_facts(run: RecordedRun, classes: Mapping[str, Any] | None) -> dict[str, str]:
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
        facts["privacy"] = describe_privacy(spent)
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


def compare_groups(groups: Groups) -> dict[str, Any]:
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
