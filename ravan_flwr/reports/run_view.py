"""Return the content of a run's page: texts and numbers, all of which the page escapes."""

import json
import os
import re
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from markupsafe import Markup

from ravan_flwr.config.keys import as_typed
from ravan_flwr.reports.card import privacy_of
from ravan_flwr.reports.charts import Chart
from ravan_flwr.reports.classes import class_table, classes_of
from ravan_flwr.runs import status
from ravan_flwr.runs.console import (
    LOG_FILE,
    last_lines,
    megabytes,
    minutes,
    remaining_seconds,
    uploads_seen,
)
from ravan_flwr.runs.directory import RoundsFile, RunDirectory, how_to_resume
from ravan_flwr.runs.history import Groups, RecordedRun, common_metric
from ravan_flwr.runs.lock import NAME as LOCK
from ravan_flwr.runs.lock import Holder, holder_of
from ravan_flwr.runs.record import ClientRecord
from ravan_flwr.runs.status import NodeStatus, RunStatus, read_status
from ravan_flwr.tasks import lower_is_better

_SIGNS_OF_LIFE = ("config.json", "rounds.jsonl", status.NAME, LOG_FILE, LOCK)
_WATCHED = (*_SIGNS_OF_LIFE, "summary.json", "failure.json", "classes.json")


@dataclass(frozen=True)
class RunSnapshot:
    """The content of a run directory at one moment."""

    run: RecordedRun  # its config is empty before the run has written it
    failure: str | None
    status: RunStatus | None  # None in runs of earlier versions
    log: list[str]
    holder: Holder  # which process works on it
    heard: float  # time of the last write, in seconds since 1970

    @classmethod
    def read(cls, path: Path, rounds_file: RoundsFile | None = None) -> "RunSnapshot":
        """Read a run directory's present records; raise ValueError for other or damaged folders."""
        return cls.of(RecordedRun.so_far(path, rounds_file))

    @classmethod
    def of(cls, run: RecordedRun) -> "RunSnapshot":
        """Read the files beside a run's records."""
        has_failure = (run.path / "failure.json").is_file()
        failure = RunDirectory(run.path).read_json("failure.json") if has_failure else None
        stats = filter(None, (_stat(run.path / name) for name in _SIGNS_OF_LIFE))
        return cls(
            run=run,
            failure=None if failure is None else str(failure.get("error", "no reason given")),
            status=read_status(run.path),
            log=last_lines(run.path),
            holder=holder_of(run.path),
            heard=max((s.st_mtime for s in stats), default=time.time()),
        )

    @property
    def rounds(self) -> int:
        """Return how many rounds there will be; 0 if that is unknown."""
        if self.status and self.status["rounds"]:
            return self.status["rounds"]
        planned = self.run.config.get("num-rounds")
        return planned if type(planned) is int else 0

    @property
    def last_round(self) -> int:
        return self.run.rounds[-1]["round"] if self.run.rounds else 0

    @property
    def under_way(self) -> bool:
        """Return whether a process works on the run, as far as this machine can see."""
        if self.holder == "unknown":
            return self.run.summary is None and self.failure is None
        return self.holder == "a process"


@dataclass(frozen=True)
class State:
    """A run's state: a word, and a sentence to which the page adds the time since `since`."""

    word: str  # running, finished, failed, stopped
    text: str
    since: float | None = None  # in seconds since 1970
    advice: str = ""
    progress: float = 0.0  # fraction of the rounds


def state_of(snapshot: RunSnapshot) -> State:
    """Return the state of a run: running, finished, failed or stopped."""
    last = snapshot.last_round
    progress = min(1.0, last / snapshot.rounds) if snapshot.rounds else 0.0
    if snapshot.under_way:
        return _running(snapshot, progress)
    after = f"after {last} round{'' if last == 1 else 's'}"
    advice = f"To continue: {how_to_resume(snapshot.run.path)}"
    if snapshot.failure is not None:
        return State("failed", f"It failed {after}: {snapshot.failure}", None, advice, progress)
    if snapshot.run.summary is not None:
        return State("finished", f"It ended {after}.", None, "", 1.0)
    if not last:
        advice = "No round has finished, so there is nothing to resume; start a new run."
    how = "Its process is gone" if snapshot.holder == "a dead process" else "It was stopped"
    text = f"{how} {after}, without a result. Nothing was written for"
    return State("stopped", text, snapshot.heard, advice, progress)


def _running(snapshot: RunSnapshot, progress: float) -> State:
    """Return the state of a run under way: its step, and since when."""
    status, advice = snapshot.status, ""
    if not any(record["round"] for record in snapshot.run.rounds):
        advice = "No round has finished yet; the pictures come with the first."
    if snapshot.holder == "unknown":
        advice = f"Whether its process is alive cannot be seen from this machine. {advice}"
    if status is None:
        text = "It is running" if snapshot.run.rounds else "It is being prepared"
        return State(
            "running", f"{text}. Nothing was written for", snapshot.heard, advice, progress
        )
    requests = len(status["asked"])
    answers = f", {len(status['answered'])} of {requests} clients have answered" if requests else ""
    clients = status.get("clients", len(status["nodes"]))
    text = {
        "recruiting": f"Waiting for clients, {clients} {'is' if clients == 1 else 'are'} here",
        "calibrating": f"Calibrating before the first round{answers}",
    }.get(
        status["doing"], f"Round {status['round']} of {snapshot.rounds}: {status['doing']}{answers}"
    )
    return State("running", f"{text}, for", status["since"], advice, progress)


def version_of(run: Path) -> str:
    """Return a text that changes whenever one of a run's files changes."""
    stats = [_stat(run / name) for name in _WATCHED]
    stamps = [f"{s.st_ino}.{s.st_size}.{s.st_mtime_ns}" if s else "" for s in stats]
    return "-".join([*stamps, holder_of(run)])


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


LISTED_CLIENTS = 300  # clients that are listed
MOST_REJECTED = 50  # the last ones, of a run under way
AT_WORK = "at work"


def picture_of(chart: Chart) -> dict[str, Any]:
    """Draw a chart for the page."""
    svg = re.sub(r' xmlns(:xlink)?="[^"]*"', "", chart.svg())  # which HTML does not need
    texts = {"title": chart.title, "about": chart.about, "broad": chart.broad}
    return {**texts, "svg": Markup(svg)}  # noqa: S704 (matplotlib has escaped the texts in it)


def view_of(
    snapshot: RunSnapshot, pictures: Sequence[Mapping[str, Any]] = (), *, live: bool = True,
    row: str = "",
) -> dict[str, Any]:  # fmt: skip
    """Return the page's content for one run, from files that may be damaged.

    `row` is the run's row in a comparison.
    """
    run, config = snapshot.run, snapshot.run.config
    row = row or config.get("method", "")
    classes = classes_of(run.path, run.rounds)
    rejected = [
        (record["round"], rejection["client"], rejection["reason"])
        for record in run.rounds
        for rejection in record["rejected"]
    ]
    return {
        "title": title_of(config) or run.path.name,
        "name": f"{row}, seed {config.get('seed', '?')}: {run.path.name}",
        "path": str(run.path),
        "live": live,
        "state": state_of(snapshot) if live else None,
        "finished": run.summary is not None,
        "collapsed": _collapsed(run),
        "facts": facts_of(snapshot, classes),
        "pictures": pictures,
        "classes": class_table(classes) if classes else None,
        "clients": _clients(snapshot, live),
        "refused": [(refusal["node"], refusal["reason"]) for refusal in snapshot.status["refused"]]
        if snapshot.status
        else [],
        "rejected": rejected[-MOST_REJECTED:][::-1] if live else rejected,
        "rejections": len(rejected),
        "log": [
            (line, " WARNING " in line[:40] or " ERROR " in line[:40]) for line in snapshot.log
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


def facts_of(snapshot: RunSnapshot, classes: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the main numbers of a run so far."""
    run, metric = snapshot.run, common_metric([snapshot.run])
    summary: Mapping[str, Any] = run.summary or {}
    curve, losses = run.curve(metric), run.train_loss()[1]
    rounds, values = curve.get("round", []), curve.get(metric, [])
    extreme, choose = ("lowest", min) if lower_is_better(metric) else ("highest", max)
    best = choose(range(len(values)), key=values.__getitem__, default=0)
    last: Mapping[str, Any] = run.rounds[-1] if run.rounds else {}
    spent = last.get("privacy") or {}
    seconds = [record["seconds"] for record in run.rounds]
    took = minutes(sum(seconds))
    left = (snapshot.rounds or 0) - snapshot.last_round
    if snapshot.under_way and seconds and left > 0:  # not while it writes its report
        took += f", about {minutes(remaining_seconds(seconds, left))} left"
    link = sum(record.get("link-bytes-estimate", 0) for record in run.rounds)
    facts = {
        f"{metric}, last": f"{values[-1]:.4f}" if values else "not evaluated",
        f"{metric}, {extreme}": f"{values[best]:.4f}, round {rounds[best]}" if values else "-",
        "training loss, last": f"{losses[-1]:.4f}" if losses else "",
        "rounds": f"{snapshot.last_round} of {snapshot.rounds or '?'}",
        "time": took,
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


def _clients(snapshot: RunSnapshot, live: bool) -> dict[str, Any]:
    """List the clients by partition; of too many, those that are or were active."""
    status: Mapping[str, Any] = snapshot.status or {}
    nodes: dict[int, NodeStatus] = {node["partition-id"]: node for node in status.get("nodes", [])}
    replies: dict[int, list[tuple[int, ClientRecord]]] = {number: [] for number in nodes}
    rejected = defaultdict[str, list[str]](list)
    for record in snapshot.run.rounds:
        for client in record["clients"]:
            replies.setdefault(client["partition-id"], []).append((record["round"], client))
        for reply in record["rejected"]:
            rejected[reply["client"]].append(f"round {record['round']}: {reply['reason']}")
    now = _activities(snapshot) if live and snapshot.under_way else {}
    rows = [
        {
            "partition": number,
            "now": now.get(number, ""),
            "rejected": len(rejected[f"partition {number}"]),
            "reason": "".join(rejected[f"partition {number}"][-1:]),  # of the last rejection
            "rounds": len(history),  # in which its reply was used
            "last_round": history[-1][0] if history else 0,
            "bytes_up": sum(client["bytes-up"] for _, client in history),
            "bytes_down": sum(client["bytes-down"] for _, client in history),
            **_client_cells(
                nodes.get(number),
                history[-1][1] if history else None,
                simulated=snapshot.run.in_simulated_time,
            ),
        }
        for number, history in replies.items()
    ]
    # First clients at work, then those with another state or a rejection, then the latest ones.
    chosen = sorted(
        rows,
        key=lambda client: (
            client["now"] != AT_WORK,
            not (client["now"] or client["rejected"]),
            -client["last_round"],
            client["partition"],
        ),
    )[:LISTED_CLIENTS]
    total = max(len(rows), status.get("clients", 0))
    return {
        "listed": sorted(chosen, key=lambda client: client["partition"]),
        "more": total - len(chosen),
        "missing": max(0, status["partitions"] - total) if live and nodes else 0,
    }


def _client_cells(
    node: NodeStatus | None, reply: ClientRecord | None, *, simulated: bool
) -> dict[str, Any]:
    """Return the cells of what a client's node reported, or else its last reply."""
    known: Mapping[str, Any] = node or reply or {}
    last: Mapping[str, Any] = reply or {}
    seconds = f"{last['seconds']:.1f}" if "seconds" in last else ""
    if "device" in last and "span" in last:  # a simulated device, with simulated seconds
        begin, end = last["span"]
        seconds = f"{end - begin:.3g}"
    return {
        # Outside simulated time a node's own device counts.
        "device": last.get("device", "") or ("" if simulated else known.get("device", "")),
        "budget": f"{known['budget-fraction']:g}",
        "examples": f"{known['examples']:,}{' of its own' * known.get('own-data', False)}",
        "heard": node["heard"] if node else "",
        "heads": f"{last['heads']:g}" if last else "",
        "seconds": seconds,
    }


def _activities(snapshot: RunSnapshot) -> dict[int, str]:
    """Return what each client is doing, by partition, in a run under way."""
    last: Mapping[str, Any] = snapshot.run.rounds[-1] if snapshot.run.rounds else {}
    now = dict.fromkeys(last.get("skipped", []), "is skipped: it was unresponsive")
    now |= dict.fromkeys(last.get("not-eligible", []), "is not eligible: cannot afford the method")
    if snapshot.status is not None:
        now |= dict.fromkeys(snapshot.status["asked"], AT_WORK)
        now |= dict.fromkeys(snapshot.status["answered"], "has answered")
    return now
