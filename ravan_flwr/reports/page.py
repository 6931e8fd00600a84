"""Write the page of a report: one HTML file that needs no other, light or dark like its reader."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from ravan_flwr.config.key_values import as_typed
from ravan_flwr.reports.card import privacy_of
from ravan_flwr.reports.chart import Chart
from ravan_flwr.reports.classes import class_table, classes_of, without_classes
from ravan_flwr.reports.clients import in_words
from ravan_flwr.reports.template import CSS, PAGE
from ravan_flwr.runs.console import megabytes, minutes, uploads_seen
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric
from ravan_flwr.runs.samples import compared, samples_of
from ravan_flwr.specs import LOWER_IS_BETTER

# Names of clients and reasons for a rejection come from clients, who may lie: all is escaped that
# is not marked as HTML here.
_ENVIRONMENT = Environment(
    autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
)


def page_of(
    runs: Sequence[RecordedRun],
    groups: Groups,
    charts: Sequence[Chart],
    belonging: Sequence[Mapping[str, Any]],
) -> str:
    """Lay out the pictures that compare, then what belongs to each run."""
    names = (f"{run.config['method']} on {run.config['preset']}" for run in runs)
    page = _ENVIRONMENT.from_string(PAGE).render(
        title=", ".join(dict.fromkeys(names)),
        style=Markup(CSS),  # noqa: S704 (a constant)
        compared=list(charts),
        comparison=_comparison(groups),
        runs=list(belonging),
    )
    return page.lstrip()


def described(run: RecordedRun, charts: Sequence[Chart]) -> dict[str, Any]:
    """Collect what the page says of one run, from files that may be damaged."""
    config, classes = run.config, classes_of(run.path, run.rounds)
    return {
        "name": f"{config['method']}, seed {config['seed']}: {run.path.name}",
        "path": run.path,
        "finished": run.summary is not None,
        "collapsed": _collapsed(run),
        "facts": _facts(run, classes),
        "charts": charts,
        "classes": class_table(classes) if classes else None,
        "without_classes": without_classes(config),
        "samples": compared(samples_of(run.path, run.rounds)),
        "rejected": [
            (record["round"], one["client"], one["reason"])
            for record in run.rounds
            for one in record["rejected"]
        ],
        "settings": [(name, as_typed(value)) for name, value in config.items()],
    }


def _facts(run: RecordedRun, classes: Mapping[str, Any] | None) -> dict[str, str]:
    """Give the end of a run in a few numbers."""
    metric = common_metric([run])
    values = run.measured(metric)[1]
    extreme, best = ("lowest", min) if metric in LOWER_IS_BETTER else ("highest", max)
    facts = {
        f"{metric}, last": f"{values[-1]:.4f}" if values else "not evaluated",
        f"{metric}, {extreme}": f"{best(values):.4f}" if values else "-",
        **({"macro-F1, last": f"{classes['macro-f1']:.4f}"} if classes else {}),
        **({"last, client by client": differ} if (differ := in_words(run)) else {}),
        "rounds": f"{run.rounds[-1]['round']} of {run.config['num-rounds']}",
        "sent by clients": megabytes(sum(record["bytes-up"] for record in run.rounds)),
        "sent to clients": megabytes(sum(record["bytes-down"] for record in run.rounds)),
        "time": minutes(sum(record["seconds"] for record in run.rounds)),
        "rejected replies": str(sum(len(record["rejected"]) for record in run.rounds)),
    }
    if (until := run.config.get("until-metric")) and run.summary:
        reached = run.summary.get("reached")
        facts["until-metric"] = f"{until:g}, " + (
            "not reached" if reached is None else f"reached in round {reached}"
        )
    if (spent := run.rounds[-1].get("privacy")) is not None:
        facts["privacy"] = privacy_of(spent)
    if seen := uploads_seen(run.config):
        facts["uploads"] = seen
    if run.summary:
        facts["trained parameters"] = f"{run.summary['trainable-parameters']:,}"
    return facts


def _collapsed(run: RecordedRun) -> str:
    """Say in which rounds the evaluation had collapsed, and why; empty if in none."""
    rounds = [record for record in run.rounds if "collapsed" in record]
    if not rounds:
        return ""
    numbers = ", ".join(str(record["round"]) for record in rounds)
    return (
        f"The evaluation collapsed in round{'s' * (len(rounds) > 1)} {numbers}. Round "
        f"{rounds[-1]['round']}: {rounds[-1]['collapsed']}. The likely cause is a learning rate "
        f"that is too high (here {run.config.get('learning-rate')}); start again with a lower one."
    )


def _comparison(groups: Groups) -> dict[str, Any]:
    """Make a table with a row for each line of the charts."""
    metric = common_metric([run for runs in groups.values() for run in runs])
    heads = ["", "runs", "rounds", f"{metric}, mean", "least to greatest", "sent, up and down"]
    return {"heads": heads, "rows": [_row(name, runs, metric) for name, runs in groups.items()]}


def _row(name: str, runs: Sequence[RecordedRun], metric: str) -> tuple[object, ...]:
    """Sum up runs that differ in the seed alone."""
    values = [value for run in runs for value in run.measured(metric)[1][-1:]]
    mean = f"{sum(values) / len(values):.4f}" if values else "not evaluated"
    spread = f"{min(values):.4f} to {max(values):.4f}" if len(values) > 1 else ""
    sent = sum(run.bytes_so_far()[-1] for run in runs) / len(runs)
    rounds = ", ".join(map(str, sorted({run.rounds[-1]["round"] for run in runs})))
    if not all(run.summary for run in runs):
        rounds += ", unfinished"
    if number := sum("collapsed" in run.rounds[-1] for run in runs):
        rounds += f", {number} collapsed at the end"
    return name, len(runs), rounds, mean, spread, f"{sent:.2f} MB"
