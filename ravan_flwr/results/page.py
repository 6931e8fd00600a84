"""The page of a report: one HTML file that needs nothing else, light or dark as its reader is."""

import html
from collections.abc import Sequence

from ravan_flwr.results.charts import Chart
from ravan_flwr.runs.console import megabytes, minutes
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric


def page_of(
    groups: Groups, compared: Sequence[Chart], of_runs: Sequence[tuple[RecordedRun, list[Chart]]]
) -> str:
    """The pictures that compare, then what belongs to each run."""
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


def _facts(run: RecordedRun) -> str:
    """The end of a run in a few numbers."""
    metric = common_metric([run])
    last = run.measured(metric)[1]
    facts = {
        metric: f"{last[-1]:.4f}" if last else "not evaluated",
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
    metric = common_metric([run for runs in groups.values() for run in runs])
    rows = []
    for name, runs in groups.items():
        values = [value for run in runs for value in run.measured(metric)[1][-1:]]
        mean = f"{sum(values) / len(values):.4f}" if values else "not evaluated"
        spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
        sent = sum(run.bytes_so_far()[-1] for run in runs) / len(runs)
        rounds = sorted({run.rounds[-1]["round"] for run in runs})
        told = ", ".join(map(str, rounds)) + (
            "" if all(r.summary for r in runs) else ", unfinished"
        )
        cells = [len(runs), told, mean, spread, f"{sent:.2f} MB"]
        row = "".join(f"<td>{_safe(cell)}</td>" for cell in cells)
        rows.append(f'<th scope="row">{_safe(name)}</th>{row}')
    titles = ("", "runs", "rounds", metric, "least to best", "sent")
    heads = "".join(f'<th scope="col">{_safe(title)}</th>' for title in titles)
    body = "".join(f"<tr>{row}</tr>" for row in rows)
    return f"<div class=wide><table><tr>{heads}</tr>{body}</table></div>"


def _grid(charts: Sequence[Chart]) -> str:
    figures = "".join(
        f"<figure><figcaption>{_safe(chart.title)}</figcaption>"
        + chart.svg().replace("<svg", f'<svg role="img" aria-label="{_safe(chart.about)}"', 1)
        + "</figure>"
        for chart in charts
    )
    return f"<div class=grid>{figures}</div>"


def _rejected(run: RecordedRun) -> str:
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


def _settings(run: RecordedRun) -> str:
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
  --line: #d8dee4; --card: #f6f8fa; --warn: #9a4c00; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #0e1116; --ink: #e6e9ed; --soft: #9aa5b1; --line: #2b323a; --card: #161b22;
  --warn: #f0a35e; } }
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
summary { cursor: pointer; padding: .5rem 0; } .warn { color: var(--warn); }
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
