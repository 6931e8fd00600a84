"""Say of runs what their page shows: in words and numbers, all of which the page escapes."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from ravan_flwr.config.keys import as_typed
from ravan_flwr.reports.card import privacy_of
from ravan_flwr.reports.chart import Chart
from ravan_flwr.reports.classes import class_table, classes_of, without_classes
from ravan_flwr.reports.run_charts import spreads
from ravan_flwr.reports.snapshot import RunSnapshot, state_of
from ravan_flwr.runs.console import megabytes, minutes, uploads_seen
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric
from ravan_flwr.runs.samples import compared, last_samples, samples_of
from ravan_flwr.runs.status import LARGEST
from ravan_flwr.specs import LOWER_IS_BETTER

MOST = 300  # clients that are listed
MOST_REJECTED = 50  # the last ones, of a run under way
AT_WORK = "at work"


def picture_of(chart: Chart) -> dict[str, Any]:
    """Draw a chart for the page."""
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", chart.svg())  # as HTML has it anyway
    told = {"title": chart.title, "about": chart.about, "broad": chart.broad}
    return {**told, "svg": Markup(svg)}  # noqa: S704 (matplotlib has escaped the texts in it)


def view_of(
    seen: RunSnapshot, pictures: Sequence[Mapping[str, Any]] = (), *, live: bool = True
) -> dict[str, Any]:
    """Collect what the page says of one run, from files that may be damaged."""
    run, config = seen.run, seen.run.config
    classes = classes_of(run.path, run.rounds)
    rejected = [
        (record["round"], one["client"], one["reason"])
        for record in run.rounds
        for one in record["rejected"]
    ]
    return {
        "title": title_of(config) or run.path.name,
        "name": f"{config.get('method', '')}, seed {config.get('seed', '?')}: {run.path.name}",
        "path": str(run.path),
        "live": live,
        "state": state_of(seen) if live else None,
        "finished": run.summary is not None,
        "collapsed": _collapsed(run),
        "facts": facts_of(seen, classes),
        "pictures": pictures,
        "classes": class_table(classes) if classes else None,
        "without_classes": without_classes(config),
        "samples": compared((last_samples if live else samples_of)(run.path, run.rounds)),
        "people": _participants(seen, live),
        "refused": [(one["node"], one["reason"]) for one in seen.status["refused"]]
        if seen.status
        else [],
        "rejected": rejected[-MOST_REJECTED:][::-1] if live else rejected,
        "rejections": len(rejected),
        "log": [(line, " WARNING " in line[:40] or " ERROR " in line[:40]) for line in seen.log],
        "settings": [(name, as_typed(value)) for name, value in config.items()],
    }


def title_of(config: Mapping[str, Any]) -> str:
    """Name a run by what it trains; empty before its settings are there."""
    return f"{config['method']} on {config['preset']}" if "method" in config else ""


def facts_of(seen: RunSnapshot, classes: Mapping[str, Any] | None) -> dict[str, str]:
    """Give a run so far in a few numbers."""
    run = seen.run
    metric = common_metric([run])
    summary: Mapping[str, Any] = run.summary or {}
    (rounds, values), losses = run.measured(metric), run.train_loss()[1]
    extreme, choose = ("lowest", min) if metric in LOWER_IS_BETTER else ("highest", max)
    best = choose(range(len(values)), key=values.__getitem__, default=0)
    spent: Mapping[str, Any] = (run.rounds[-1].get("privacy") if run.rounds else None) or {}
    left, until = seen.seconds_left(), run.config.get("until-metric")
    reached = summary.get("reached")
    link = sum(record.get("link-bytes-estimate", 0) for record in run.rounds)
    facts = {
        f"{metric}, last": f"{values[-1]:.4f}" if values else "not evaluated",
        f"{metric}, {extreme}": f"{values[best]:.4f}, round {rounds[best]}" if values else "-",
        "macro-F1, last": f"{classes['macro-f1']:.4f}" if classes else "",
        "last, client by client": _spread_in_words(run),
        "training loss, last": f"{losses[-1]:.4f}" if losses else "",
        "rounds": f"{seen.last_round} of {seen.rounds or '?'}",
        "time": minutes(sum(record["seconds"] for record in run.rounds)),
        "time left, about": "" if left is None else minutes(left),
        "sent by clients": megabytes(sum(record["bytes-up"] for record in run.rounds)),
        "sent to clients": megabytes(sum(record["bytes-down"] for record in run.rounds)),
        "on the links, about": megabytes(link) if link else "",
        "rejected replies": str(sum(len(record["rejected"]) for record in run.rounds)),
        "until-metric": f"{until:g}, "
        + ("not reached" if reached is None else f"reached in round {reached}")
        if until and summary
        else "",
        "privacy": privacy_of(spent) if spent else "",
        "epsilon to the server": f"{spent['epsilon-to-server']:.3f}"
        if "epsilon-to-server" in spent
        else "",
        "uploads": uploads_seen(run.config),
        "trained parameters": f"{summary['trainable-parameters']:,}"
        if "trainable-parameters" in summary
        else "",
    }
    return {name: value for name, value in facts.items() if value}


def _spread_in_words(run: RecordedRun) -> str:
    """Describe the last spread over the clients in a line; empty where there is none."""
    name, found = spreads(run)
    if not found:
        return ""
    last = found[max(found)]
    return (
        f"{name} {last['min']:.4f} to {last['max']:.4f}, median {last['median']:.4f}, standard "
        f"deviation {last['std']:.4f}, over {last['clients']:.0f} clients"
    )


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


def comparison_of(groups: Groups) -> dict[str, Any]:
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


@dataclass
class Participant:
    """Hold what the page says of one client."""

    partition: int
    device: str = ""
    budget: str = ""
    examples: str = ""
    rounds: int = 0  # in which its reply was used
    last_round: int = 0
    heads: str = ""
    seconds: str = ""
    bytes_up: float = 0
    bytes_down: float = 0
    heard: float | None = None  # in seconds since 1970
    now: str = ""
    rejected: int = 0
    reason: str = ""  # of the last rejection


def _participants(seen: RunSnapshot, live: bool) -> dict[str, Any]:
    """List the clients by partition; where there are too many, those that do or did something."""
    people: dict[int, Participant] = {}
    nodes = seen.status["nodes"] if seen.status else []
    for node in nodes:  # what the nodes said of themselves
        one = people.setdefault(node["partition-id"], Participant(node["partition-id"]))
        one.device, one.budget = node["device"], f"{node['share']:g}"
        one.examples = f"{node['examples']:,}{' of its own' if node['own-data'] else ''}"
        one.heard = node["heard"] or None
    for record in seen.run.rounds:
        for client in record["clients"]:
            number = client["partition-id"]
            if type(number) is int:
                one = people.setdefault(number, Participant(number))
                _add_reply(one, record["round"], client)
    _add_rejections(people, seen.run)
    if live and seen.under_way:
        _add_now(people, seen)
    chosen = sorted(people.values(), key=_by_interest)[:MOST]
    known = max(len(people), seen.status.get("members", 0) if seen.status else 0)
    partitions = max((record["partitions"] for record in seen.run.rounds), default=0)
    if seen.status:
        partitions = seen.status["partitions"] if nodes else 0
    return {
        "listed": sorted(chosen, key=lambda one: one.partition),
        "more": known - len(chosen),
        "missing": max(0, partitions - known) if live else 0,
    }


def _by_interest(one: Participant) -> tuple[bool, bool, int, int]:
    """Sort who is at work first, then who does or has something else, then who was the last."""
    other = not one.now and not one.rejected
    return one.now != AT_WORK, other, -one.last_round, one.partition


def _add_reply(one: Participant, number: int, client: Mapping[str, Any]) -> None:
    one.rounds += 1
    one.last_round = number
    one.bytes_up += _number(client, "bytes-up")
    one.bytes_down += _number(client, "bytes-down")
    one.heads = f"{_number(client, 'heads'):g}"
    one.seconds = f"{_number(client, 'seconds'):.1f}" if "seconds" in client else ""
    one.budget = one.budget or f"{_number(client, 'share'):g}"
    one.examples = one.examples or f"{_number(client, 'examples'):,.0f}"


def _number(client: Mapping[str, Any], key: str) -> float:
    """Read a number of a client's record; 0 where it is none."""
    value = client.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return 0.0
    return value if abs(value) < LARGEST else 0.0


def _add_rejections(people: Mapping[int, Participant], run: RecordedRun) -> None:
    """Add how often a client's reply was rejected, and why the last time."""
    rejected: Counter[str] = Counter()
    reasons: dict[str, str] = {}
    for record in run.rounds:
        for reply in record["rejected"]:
            name = str(reply["client"])
            rejected[name] += 1
            reasons[name] = f"round {record['round']}: {reply['reason']}"
    for one in people.values():
        name = f"partition {one.partition}"
        one.rejected, one.reason = rejected[name], reasons.get(name, "")


def _add_now(people: Mapping[int, Participant], seen: RunSnapshot) -> None:
    """Add what each is doing, in a run under way."""
    last: Mapping[str, Any] = seen.run.rounds[-1] if seen.run.rounds else {}
    for key, word in (
        ("resting", "is skipped: it was unresponsive"), ("left-out", "cannot afford it")
    ):  # fmt: skip
        for number in last.get(key, []):
            if number in people:
                people[number].now = word
    if seen.status is not None:
        answered = set(seen.status["answered"])
        for number in set(seen.status["asked"]) & people.keys():
            people[number].now = "has answered" if number in answered else AT_WORK
