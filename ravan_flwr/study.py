"""Studies: a file names rows of settings; every row is run with every seed, once.

    title: ...
    num-clients: 20
    seeds: [0, 1, 2]
    settings: {classifier: frozen}          # of all rows
    tables:
      - title: How the bases are made
        rows:
          gram-schmidt: {}                  # the settings in which a row differs
          normal: {init: normal}

A run is a process of its own and has a folder named after its settings, so that rows which
mean the same run share it, a study that was interrupted goes on where it stopped, and a
failed run is listed and does not stop the others.
"""

import csv
import hashlib
import io
import json
import logging
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ravan_flwr.config import read_config
from ravan_flwr.console import megabytes, minutes
from ravan_flwr.keys import Scalar
from ravan_flwr.records import write_atomically

log = logging.getLogger(__name__)

Summary = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """One run of a study: settings, seed included, and the number of clients."""

    settings: tuple[tuple[str, Scalar], ...]
    num_clients: int

    @property
    def name(self) -> str:
        """A folder's name: the same for the same run, whatever table it stands in."""
        text = json.dumps([sorted(self.settings), self.num_clients])
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def command(self, folder: Path) -> list[str]:
        """What a person would type to run this alone."""
        words = [f"{key}={value}" for key, value in self.settings]
        words += [f"num-clients={self.num_clients}", f"output-dir={folder}"]
        return [sys.executable, "-m", "ravan_flwr", "simulate", *words]


@dataclass(frozen=True)
class Table:
    """Rows by name, each with its runs, one a seed."""

    title: str
    rows: dict[str, list[Run]]


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    title: str
    tables: list[Table]

    @property
    def runs(self) -> list[Run]:
        """Every run once, in the order of the tables."""
        every = (run for table in self.tables for runs in table.rows.values() for run in runs)
        return list(dict.fromkeys(every))


_FIELDS = {"title": str, "num-clients": int, "seeds": list, "settings": dict, "tables": list}


def read_study(path: Path) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict) or set(content) != set(_FIELDS):
        got = sorted(content) if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"study {path}: got {got}, expected the fields {sorted(_FIELDS)}")
    for field, kind in _FIELDS.items():
        if not isinstance(content[field], kind):
            raise ValueError(f"study {path}: {field} is no {kind.__name__}; correct it")
    tables = []
    for table in content["tables"]:
        rows = {}
        for name, changes in table["rows"].items():
            settings = content["settings"] | changes
            try:
                read_config(settings)
            except ValueError as error:
                raise ValueError(f"study {path}: row {name!r}: {error}") from None
            rows[str(name)] = [
                Run(tuple((settings | {"seed": seed}).items()), content["num-clients"])
                for seed in content["seeds"]
            ]
        tables.append(Table(str(table["title"]), rows))
    return Study(content["title"], tables)


def run_study(path: Path, folder: Path, jobs: int) -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed."""
    study = read_study(path)
    todo = [run for run in study.runs if _summary(folder, run) is None]
    log.info(
        "%s: %d runs, %d of them done, %d at a time; folder %s",
        study.title, len(study.runs), len(study.runs) - len(todo), jobs, folder,
    )  # fmt: skip
    failed = dict(_run_all(todo, folder, jobs))
    write_atomically(folder / "results.md", markdown(study, folder).encode())
    write_atomically(folder / "results.csv", comma_separated(study, folder).encode())
    for run, reason in failed.items():
        log.warning("failed: %s: %s", " ".join(f"{k}={v}" for k, v in run.settings), reason)
    log.info("tables: %s", folder / "results.md")
    return not failed


def _run_all(todo: list[Run], folder: Path, jobs: int) -> Iterator[tuple[Run, str]]:
    """Run all; yield those that failed with the reason."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started = time.monotonic()

    def execute(run: Run) -> subprocess.CompletedProcess[str]:
        target = folder / "runs" / run.name
        return subprocess.run(
            run.command(target), env=environment, check=False, capture_output=True, text=True
        )

    with ThreadPoolExecutor(jobs) as pool:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, ended = waiting[future], future.result()
            left = (time.monotonic() - started) / number * (len(todo) - number)
            told = (ended.stdout if ended.returncode == 0 else ended.stderr).strip().splitlines()
            last = next((line for line in reversed(told) if line.startswith("done")), told[-1])
            log.info(
                "%d/%d  left %s  %s: %s",
                number, len(todo), minutes(left),
                " ".join(f"{k}={v}" for k, v in run.settings), last,
            )  # fmt: skip
            if ended.returncode:
                yield run, told[-1]


def _summary(folder: Path, run: Run) -> Summary | None:
    """The summary of a run that is done."""
    found = sorted((folder / "runs" / run.name).glob("*/summary.json"))
    if not found:
        return None
    content: Summary = json.loads(found[-1].read_text(encoding="utf-8"))
    return content


@dataclass(frozen=True)
class _Line:
    """A row of a table: what its seeds came to."""

    table: str
    row: str
    metric: str
    finals: list[float]
    parameters: int
    rank: int
    bytes_up: float
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.finals)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.finals) if len(self.finals) > 1 else 0.0


def _lines(table: Table, folder: Path) -> Iterator[_Line]:
    for row, runs in table.rows.items():
        done = [summary for run in runs if (summary := _summary(folder, run)) is not None]
        if not done:
            continue
        metric = next(name for name in done[0]["metrics"]["final"] if name != "loss")
        yield _Line(
            table.title,
            row,
            metric,
            [summary["metrics"]["final"][metric] for summary in done],
            done[0]["trainable-parameters"],
            done[0]["rank"],
            statistics.mean(summary["bytes-up"] for summary in done),
            statistics.mean(summary["seconds"] for summary in done),
        )


def markdown(study: Study, folder: Path) -> str:
    """The tables for people: mean and standard deviation over the seeds, the best in bold."""
    text = [f"# {study.title}", ""]
    for table in study.tables:
        lines = list(_lines(table, folder))
        best = max((line.mean for line in lines), default=0.0)
        metric = lines[0].metric if lines else "metric"
        text += [
            f"## {table.title}",
            "",
            f"| | {metric}, % | by seed | rank | parameters | up | seconds |",
            "| --- | --- | --- | --- | --- | --- | --- |",
        ]
        for line in lines:
            value = f"{100 * line.mean:.1f} ± {100 * line.spread:.1f}"
            value = f"**{value}**" if line.mean == best else value
            seeds = " ".join(f"{100 * final:.1f}" for final in line.finals)
            text.append(
                f"| {line.row} | {value} | {seeds} | {line.rank} | {line.parameters:,} | "
                f"{megabytes(round(line.bytes_up))} | {line.seconds:.0f} |"
            )
        text.append("")
    return "\n".join(text)


def comma_separated(study: Study, folder: Path) -> str:
    """The same for machines, in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(
        ["table", "row", "metric", "mean", "spread", "seeds", "rank", "parameters", "bytes-up",
         "seconds"]
    )  # fmt: skip
    for table in study.tables:
        for line in _lines(table, folder):
            writer.writerow(
                [line.table, line.row, line.metric, line.mean, line.spread,
                 " ".join(map(str, line.finals)), line.rank, line.parameters, line.bytes_up,
                 line.seconds]
            )  # fmt: skip
    return buffer.getvalue()
