"""A page and pictures of one run, or of several laid over each other.

It reads run directories alone: `config.json`, `rounds.jsonl` and, of a finished run,
`summary.json`. Runs that differ in nothing but the seed are one line with a band.
"""

import html
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.charts import Chart, Series, bars, heat, lines, stacks
from ravan_flwr.console import megabytes, minutes
from ravan_flwr.records import Record, RunDirectory, write_atomically

# Settings in which runs may differ and still be seeds of one thing.
_NOT_A_DIFFERENCE = {
    "seed", "output-dir", "resume", "device", "round-timeout", "report", "tracking",
}  # fmt: skip


@dataclass(frozen=True)
class Run:
    """What a run directory tells."""

    path: Path
    config: Record
    rounds: list[Record]  # a calibration round first, if there was one
    summary: Record | None  # None: it has not finished

    @classmethod
    def read(cls, path: Path) -> "Run":
        """Read a run directory; ValueError if it is none, or no round has ended."""
        directory = RunDirectory.open(path, "report")
        rounds = directory.read_rounds()
        if not any(record["round"] for record in rounds):
            raise ValueError(
                f"report: {path} has no finished round, expected at least one; run it longer"
            )
        done = (path / "summary.json").is_file()
        summary = directory.read_json("summary.json") if done else None
        config = directory.read_json("config.json")
        if summary:  # the preset's number stands in the configuration, the true one here
            config["num-clients"] = summary["num-clients"]
        return cls(path, config, rounds, summary)

    @property
    def metric(self) -> str:
        """The name of what was measured beside the loss."""
        names = {name for record in self.rounds for name in record["metrics"]} - {"loss"}
        return min(names, default="loss")

    def bytes_so_far(self) -> list[float]:
        """Megabytes both ways, up to the end of each round."""
        total, so_far = 0, []
        for record in self.rounds:
            total += record["bytes-up"] + record["bytes-down"]
            so_far.append(total / 1e6)
        return so_far

    def measured(self, name: str, *, by_bytes: bool = False) -> tuple[list[float], list[float]]:
        """The rounds, or megabytes, at which a metric was measured, and its values."""
        at = self.bytes_so_far() if by_bytes else [record["round"] for record in self.rounds]
        pairs = zip(at, self.rounds, strict=True)
        points = [(x, record["metrics"][name]) for x, record in pairs if name in record["metrics"]]
        return [x for x, _ in points], [y for _, y in points]

    def train_loss(self) -> tuple[list[float], list[float]]:
        """The clients' mean loss by round."""
        records = [record for record in self.rounds if record["round"]]
        return [r["round"] for r in records], [r["train-loss"] for r in records]


Groups = dict[str, list[Run]]


def group_runs(runs: Sequence[Run]) -> Groups:
    """Runs that differ in the seed alone, under a name made of what sets them apart."""
    keys = [
        key
        for key in runs[0].config
        if key not in _NOT_A_DIFFERENCE and len({_text(run.config.get(key)) for run in runs}) > 1
    ]
    if "method" in keys:  # its rate and rank go with it
        keys = [key for key in keys if key not in {"learning-rate", "rank"}]
    groups: Groups = {}
    for run in runs:
        named = [run.config[key] if key == "method" else f"{key} {run.config[key]}" for key in keys]
        groups.setdefault(", ".join(map(str, named)) or str(run.config["method"]), []).append(run)
    return groups


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def comparison_charts(groups: Groups) -> list[Chart]:
    """Metric and losses by round, and the metric by megabyte."""
    metric = next(iter(groups.values()))[0].metric

    def series(points: Callable[[Run], tuple[list[float], list[float]]]) -> list[Series]:
        return [Series(name, [points(run) for run in runs]) for name, runs in groups.items()]

    by_bytes = series(lambda run: run.measured(metric, by_bytes=True))
    return [
        lines(
            metric, f"{metric.capitalize()} by round",
            f"{metric} on the examples held for evaluation, after each round",
            series(lambda run: run.measured(metric)), "round", metric,
        ),
        lines(
            f"{metric}-by-bytes", f"{metric.capitalize()} by megabyte sent",
            f"{metric} against all bytes sent so far, up and down", by_bytes,
            "MB sent, up and down", metric, whole=False,
        ),
        lines(
            "loss", "Loss by round", "loss on the examples held for evaluation, after each round",
            series(lambda run: run.measured("loss")), "round", "loss",
        ),
        lines(
            "train-loss", "Training loss by round",
            "the mean loss of the clients' local steps in each round",
            series(Run.train_loss), "round", "training loss",
        ),
    ]  # fmt: skip


def run_charts(run: Run, prefix: str = "") -> list[Chart]:
    """Who took part, which heads trained, what they became, and where the time went."""
    charts = [_participation(run, prefix)]
    times = _heads_trained(run)
    layers = [_short(name) for name in (run.summary or {}).get("head-norms", {})]
    layers = layers or [str(number) for number in range(len(times))]
    if times and len(times[0]) > 1:
        charts.append(
            heat(
                f"{prefix}heads", "How often each head was trained",
                "for each layer and head, in how many replies it was", times, layers, "replies",
            )
        )  # fmt: skip
    if norms := list((run.summary or {}).get("head-norms", {}).values()):
        charts.append(
            heat(
                f"{prefix}norms", "The norm of what each head adds",
                "for each layer and head, the Frobenius norm of its part of the delta-weight",
                norms, layers, "norm",
            )
        )  # fmt: skip
    charts.append(_seconds(run, prefix))
    return charts


def _participation(run: Run, prefix: str) -> Chart:
    number = max((run.summary or {}).get("num-clients", 0), *_partitions(run), 0)
    counts = {str(partition): 0.0 for partition in range(number)}
    for record in run.rounds:
        for client in record["clients"] if record["round"] else []:
            counts[str(client["partition-id"])] += 1
    return bars(
        f"{prefix}participation", "Rounds in which each client took part",
        "for each client, the number of rounds in which its reply was used",
        counts, "client (partition)", "rounds",
    )  # fmt: skip


def _partitions(run: Run) -> list[int]:
    return [client["partition-id"] + 1 for record in run.rounds for client in record["clients"]]


def _heads_trained(run: Run) -> list[list[int]]:
    """Layers by heads: in how many replies each head was."""
    replies = [client["selected"] for r in run.rounds if r["round"] for client in r["clients"]]
    if not replies:
        return []
    heads = 1 + max(head for reply in replies for layer in reply for head in layer)
    table = [[0] * heads for _ in replies[0]]
    for reply in replies:
        for row, chosen in zip(table, reply, strict=True):
            for head in chosen:
                row[head] += 1
    return table


def _seconds(run: Run, prefix: str) -> Chart:
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


def write_report(paths: Sequence[Path], folder: Path) -> Path:
    """Write `index.html` and a PNG for each picture; the page's path."""
    runs = [Run.read(path) for path in paths]
    groups = group_runs(runs)
    compared = comparison_charts(groups)
    of_runs = [
        (run, run_charts(run, f"run{number}-" if len(runs) > 1 else ""))
        for number, run in enumerate(runs, start=1)
    ]
    for chart in [*compared, *(chart for _, charts in of_runs for chart in charts)]:
        write_atomically(folder / f"{chart.name}.png", chart.png())
    page = folder / "index.html"
    write_atomically(page, _page(groups, compared, of_runs).encode())
    return page


# The page.


def _page(
    groups: Groups, compared: Sequence[Chart], of_runs: Sequence[tuple[Run, list[Chart]]]
) -> str:
    runs = [run for run, _ in of_runs]
    title = ", ".join(dict.fromkeys(f"{r.config['method']} on {r.config['preset']}" for r in runs))
    single = len(runs) == 1
    body = [f"<h1>{_safe(title)}</h1>", _facts(runs[0]) if single else _table_of(groups)]
    body.append(_grid([*compared, *(of_runs[0][1] if single else [])]))
    if single:
        body += [_rejected(runs[0]), _settings(runs[0])]
    else:
        body.append("<h2>Each run</h2>")
        for run, charts in of_runs:
            inside = "".join([_facts(run), _grid(charts), _rejected(run), _settings(run)])
            name = f"{run.config['method']}, seed {run.config['seed']}: {run.path.name}"
            body.append(f"<details><summary>{_safe(name)}</summary>{inside}</details>")
    return PAGE.format(title=_safe(title), style=CSS, body="\n".join(body))


def _facts(run: Run) -> str:
    """The end of a run in a few numbers."""
    last = run.measured(run.metric)[1]
    facts = {
        run.metric: f"{last[-1]:.4f}" if last else "not evaluated",
        "best": f"{max(last):.4f}" if last else "-",
        "rounds": f"{run.rounds[-1]['round']} of {run.config['num-rounds']}",
        "up": megabytes(sum(record["bytes-up"] for record in run.rounds)),
        "down": megabytes(sum(record["bytes-down"] for record in run.rounds)),
        "time": minutes(sum(record["seconds"] for record in run.rounds)),
        "rejected": str(sum(len(record["rejected"]) for record in run.rounds)),
    }
    if run.summary:
        facts["trained parameters"] = f"{run.summary['trainable-parameters']:,}"
    cells = "".join(f"<div><dt>{_safe(k)}</dt><dd>{_safe(v)}</dd></div>" for k, v in facts.items())
    unfinished = "" if run.summary else "<p class=warn>This run has not finished.</p>"
    return f"{unfinished}<dl class=facts>{cells}</dl>"


def _table_of(groups: Groups) -> str:
    """A row for each line of the charts."""
    rows = []
    for name, runs in groups.items():
        finals = [run.measured(run.metric)[1][-1:] for run in runs]
        values = [value for final in finals for value in final]
        mean = sum(values) / len(values) if values else 0.0
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
        sent = sum(run.bytes_so_far()[-1] for run in runs) / len(runs)
        cells = [name, len(runs), f"{mean:.4f}", spread, f"{sent:.2f} MB"]
        rows.append("".join(f"<td>{_safe(cell)}</td>" for cell in cells))
    metric = next(iter(groups.values()))[0].metric
    heads = "".join(f"<th>{_safe(h)}</th>" for h in ("", "runs", metric, "least to best", "sent"))
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def _grid(charts: Sequence[Chart]) -> str:
    figures = "".join(
        f'<figure role="img" aria-label="{_safe(chart.about)}">'
        f"<figcaption>{_safe(chart.title)}</figcaption>{chart.svg()}</figure>"
        for chart in charts
    )
    return f"<div class=grid>{figures}</div>"


def _rejected(run: Run) -> str:
    rows = [
        f"<tr><td>{record['round']}</td><td>{_safe(one['client'])}</td>"
        f"<td>{_safe(one['reason'])}</td></tr>"
        for record in run.rounds
        for one in record["rejected"]
    ]
    if not rows:
        return "<h2>Rejected replies</h2><p>None.</p>"
    head = "<tr><th>round</th><th>client</th><th>reason</th></tr>"
    return f"<h2>Rejected replies</h2><div class=wide><table>{head}{''.join(rows)}</table></div>"


def _settings(run: Run) -> str:
    rows = "".join(
        f"<tr><td>{_safe(key)}</td><td>{_safe(value)}</td></tr>"
        for key, value in run.config.items()
    )
    table = f"<div class=wide><table>{rows}</table></div>"
    return f"<details><summary>Settings</summary>{table}<p>{_safe(run.path)}</p></details>"


def _safe(value: object) -> str:
    return html.escape(str(value))


CSS = """\
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1f24; --soft: #5c6670;
  --line: #d8dee4; --card: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1116; --ink: #e6e9ed; --soft: #9aa5b1; --line: #2b323a; --card: #161b22; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 76rem; padding: 1.2rem; background: var(--paper);
  color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 1rem; } h2 { font-size: 1.15rem; margin: 2rem 0 .6rem; }
.facts { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr));
  gap: .6rem; margin: 0 0 1.2rem; }
.facts div { background: var(--card); border: 1px solid var(--line); border-radius: .5rem;
  padding: .5rem .8rem; }
dt { color: var(--soft); font-size: .85rem; } dd { margin: 0; font-size: 1.15rem; }
.grid { display: grid; gap: 1rem;
  grid-template-columns: repeat(auto-fit, minmax(min(100%, 22rem), 1fr)); margin: 1rem 0; }
figure { margin: 0; border: 1px solid var(--line); border-radius: .5rem; padding: .8rem; }
figcaption { font-weight: 600; margin-bottom: .4rem; }
figure svg { width: 100%; height: auto; display: block; color: var(--ink); }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .92rem; }
th, td { text-align: left; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
th { color: var(--soft); font-weight: 500; }
summary { cursor: pointer; padding: .5rem 0; } .warn { color: #b35900; }
"""

PAGE = """\
<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
{body}
</body>
</html>
"""
