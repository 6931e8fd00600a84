"""Studies: a file names rows of settings; every row is run with every seed, once.

    title: ...
    num-clients: 20
    seeds: [0, 1, 2]
    settings: {num-rounds: 10}              # of all rows
    choose:                                 # optional: a learning rate for each row of a table
      learning-rate: [1.0e-3, 1.0e-2]
      seeds: [100]
    tables:
      - title: IID
        settings: {partition: iid}          # optional: of the rows of this table
        equal-parameters: true              # optional: refuse rows that differ by more than 5 %
        references: [full]                  # optional: rows that are not compared so
        rows:
          ravan: {}                         # the settings in which a row differs
          fedit: {method: fedit}

A run is a process of its own and has a folder named after its settings, so that rows which
mean the same run share it, a study that was interrupted goes on where it stopped, and a
failed run is listed and does not stop the others.

Learning rates are chosen on examples that the clients hold back, never on the test examples,
with seeds of their own: the rate with the best mean metric after the last round.
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
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ravan_flwr.config import read_config
from ravan_flwr.console import megabytes, minutes
from ravan_flwr.keys import AUTO, Scalar
from ravan_flwr.records import write_atomically

log = logging.getLogger(__name__)

Summary = dict[str, Any]

HELD_BACK = 0.2  # the share of its examples that a client holds back while rates are chosen
TOLERANCE = 0.05  # numbers of parameters that differ by no more are called equal


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
class Row:
    """A row of a table: settings that are run with several seeds."""

    settings: dict[str, Scalar]
    num_clients: int
    seeds: list[int]
    rates: list[float]  # the learning rates to choose from; empty: the settings say it
    rate_seeds: list[int]

    def candidates(self, rate: float) -> list[Run]:
        """The runs that tell how good a learning rate is."""
        held_back: dict[str, Scalar] = {
            "learning-rate": rate,
            "evaluate-on": "clients",
            "validation-share": HELD_BACK,
            "eval-every": read_config(self.settings).num_rounds,
        }
        return self._runs(held_back, self.rate_seeds)

    def runs(self, folder: Path) -> list[Run]:
        """The runs of the table, one a seed; none if every candidate failed."""
        if not self.rates:
            return self._runs({}, self.seeds)
        rate = self.chosen_rate(folder)
        return [] if rate is None else self._runs({"learning-rate": rate}, self.seeds)

    def chosen_rate(self, folder: Path) -> float | None:
        """The rate with the best mean over its seeds, the smallest of equals."""
        means = {}
        for rate in sorted(self.rates):
            done = [_summary(folder, run) for run in self.candidates(rate)]
            finals = [_final(summary)[1] for summary in done if summary is not None]
            if len(finals) == len(done):
                means[rate] = statistics.mean(finals)
        return max(means, key=means.__getitem__) if means else None

    def _runs(self, more: dict[str, Scalar], seeds: list[int]) -> list[Run]:
        return [
            Run(tuple((self.settings | more | {"seed": seed}).items()), self.num_clients)
            for seed in seeds
        ]


@dataclass(frozen=True)
class Table:
    """Rows by name."""

    title: str
    rows: dict[str, Row]


@dataclass(frozen=True)
class Study:
    """A study file, checked."""

    title: str
    tables: list[Table]

    @property
    def rows(self) -> list[Row]:
        """Those of all tables."""
        return [row for table in self.tables for row in table.rows.values()]

    def candidates(self) -> list[Run]:
        """The runs from which learning rates are chosen, each once."""
        runs = (run for row in self.rows for rate in row.rates for run in row.candidates(rate))
        return list(dict.fromkeys(runs))

    def runs(self, folder: Path) -> list[Run]:
        """The runs of the tables, each once, as far as learning rates are chosen."""
        return list(dict.fromkeys(run for row in self.rows for run in row.runs(folder)))


_FIELDS = {"title": str, "num-clients": int, "seeds": list, "settings": dict, "tables": list}
_CHOOSE = {"learning-rate": list, "seeds": list}
_TABLE = {"title": str, "rows": dict}
_TABLE_OPTIONS = {"settings": dict, "equal-parameters": bool, "references": list}


def read_study(path: Path) -> Study:
    """Read and check a study; every run's settings must be such as `simulate` takes."""
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    _check_fields(f"study {path}", content, _FIELDS, {"choose": dict})
    choose = content.get("choose", {"learning-rate": [], "seeds": []})
    _check_fields(f"study {path}: choose", choose, _CHOOSE, {})
    tables = []
    for table in content["tables"]:
        _check_fields(f"study {path}: a table", table, _TABLE, _TABLE_OPTIONS)
        rows = {}
        for name, changes in table["rows"].items():
            settings = content["settings"] | table.get("settings", {}) | changes
            rates = [] if "learning-rate" in changes else choose["learning-rate"]
            row = Row(settings, content["num-clients"], content["seeds"], rates, choose["seeds"])
            try:
                for rate in rates or [settings.get("learning-rate", AUTO)]:
                    config = read_config(settings | {"learning-rate": rate})
                if config.server_optimizer != "none":
                    from ravan_flwr.workbench import check_method  # noqa: PLC0415 (torch)

                    check_method(config)
            except ValueError as error:
                raise ValueError(f"study {path}: row {name!r}: {error}") from None
            rows[str(name)] = row
        if table.get("equal-parameters"):
            where, references = (
                f"study {path}: table {table['title']!r}",
                table.get("references", []),
            )
            if unknown := [name for name in references if name not in rows]:
                raise ValueError(
                    f"{where}: references {unknown} are no rows, expected some of {list(rows)}"
                )
            _check_equal(where, {k: v for k, v in rows.items() if k not in references})
        tables.append(Table(table["title"], rows))
    return Study(content["title"], tables)


def _check_fields(
    where: str, content: object, fields: Mapping[str, type], options: Mapping[str, type]
) -> None:
    """Raise ValueError unless `content` is a mapping with these fields, and no others."""
    got = set(content) if isinstance(content, dict) else type(content).__name__
    if not isinstance(content, dict) or not set(fields) <= set(content) <= {*fields, *options}:
        shown = sorted(got) if isinstance(got, set) else got
        optional = f", and if need be {sorted(options)}" if options else ""
        raise ValueError(f"{where}: got {shown}, expected the fields {sorted(fields)}{optional}")
    for field, kind in {**fields, **options}.items():
        if field in content and not isinstance(content[field], kind):
            raise ValueError(f"{where}: {field} is no {kind.__name__}; correct it")


def _check_equal(where: str, rows: Mapping[str, Row]) -> None:
    """Raise ValueError unless the rows train the same number of parameters, to 5 %."""
    from ravan_flwr.plan import adapter_parameters  # noqa: PLC0415 (torch, which others do without)

    if len(rows) < 2:
        raise ValueError(f"{where}: equal-parameters has rows {list(rows)}, expected at least two")
    numbers = {
        name: adapter_parameters(read_config({"learning-rate": 1.0, **row.settings}))
        for name, row in rows.items()
    }
    apart = 1 - min(numbers.values()) / max(numbers.values())
    if apart > TOLERANCE:
        listed = ", ".join(f"{name} {number:,}" for name, number in numbers.items())
        raise ValueError(
            f"{where} calls its rows equal, but the parameters that they train differ by "
            f"{100 * apart:.1f} % ({listed}), expected at most {100 * TOLERANCE:.0f} %; change "
            "lora-rank, heads or rank, name references, or take equal-parameters away"
        )


def run_study(path: Path, folder: Path, jobs: int) -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed."""
    study = read_study(path)
    log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
    failed: dict[Run, str] = {}
    if candidates := study.candidates():
        failed |= _run_missing("choosing learning rates", candidates, folder, jobs)
    failed |= _run_missing("the tables", study.runs(folder), folder, jobs)
    write_atomically(folder / "results.md", markdown(study, folder).encode())
    write_atomically(folder / "results.csv", comma_separated(study, folder).encode())
    for run, reason in failed.items():
        log.warning("failed: %s: %s", " ".join(f"{k}={v}" for k, v in run.settings), reason)
    log.info("tables: %s", folder / "results.md")
    return not failed


def _run_missing(what: str, runs: list[Run], folder: Path, jobs: int) -> dict[Run, str]:
    """Run those that are not done; those that failed, with the reason."""
    todo = [run for run in runs if _summary(folder, run) is None]
    log.info("%s: %d runs, %d of them done", what, len(runs), len(runs) - len(todo))
    return dict(_run_all(todo, folder, jobs))


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


def _final(summary: Summary) -> tuple[str, float]:
    """The task's metric after the last round: its name and value."""
    final: dict[str, float] = summary["metrics"]["final"]
    return next((name, value) for name, value in final.items() if name != "loss")


@dataclass(frozen=True)
class _Line:
    """A row of a table: what its seeds came to."""

    table: str
    row: str
    metric: str
    finals: list[float]
    rate: float
    chosen: bool  # from a grid
    at_the_edge: bool  # of that grid
    parameters: int
    rank: int | None
    bytes_up: float
    bytes_down: float
    seconds: float

    @property
    def mean(self) -> float:
        return statistics.mean(self.finals)

    @property
    def spread(self) -> float:
        return statistics.stdev(self.finals) if len(self.finals) > 1 else 0.0


def _lines(table: Table, folder: Path) -> Iterator[_Line]:
    for name, row in table.rows.items():
        runs = [run for run in row.runs(folder) if _summary(folder, run) is not None]
        done = [summary for run in runs if (summary := _summary(folder, run)) is not None]
        if not done:
            continue
        rate = read_config(dict(runs[0].settings)).learning_rate
        yield _Line(
            table.title,
            name,
            _final(done[0])[0],
            [_final(summary)[1] for summary in done],
            rate,
            bool(row.rates),
            bool(row.rates) and rate in (min(row.rates), max(row.rates)),
            done[0]["adapter-parameters"],
            done[0]["rank"],
            *(
                statistics.mean(summary[key] for summary in done)
                for key in ("bytes-up", "bytes-down", "seconds")
            ),
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
            f"| | {metric}, % | by seed | learning rate | rank | parameters | up | down | "
            "seconds |",
            "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        ]
        for line in lines:
            value = f"{100 * line.mean:.1f} ± {100 * line.spread:.1f}"
            value = f"**{value}**" if line.mean == best else value
            seeds = " ".join(f"{100 * final:.1f}" for final in line.finals)
            rate = f"{line.rate:g}" + (" (edge)" if line.at_the_edge else "")
            text.append(
                f"| {line.row} | {value} | {seeds} | {rate} | {line.rank or '-'} | "
                f"{line.parameters:,} | {megabytes(round(line.bytes_up))} | "
                f"{megabytes(round(line.bytes_down))} | {line.seconds:.0f} |"
            )
        text.append("")
    return "\n".join(text)


def comma_separated(study: Study, folder: Path) -> str:
    """The same for machines, in full precision."""
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(
        ["table", "row", "metric", "mean", "spread", "seeds", "learning-rate", "chosen", "rank",
         "parameters", "bytes-up", "bytes-down", "seconds"]
    )  # fmt: skip
    for table in study.tables:
        for line in _lines(table, folder):
            writer.writerow(
                [line.table, line.row, line.metric, line.mean, line.spread,
                 " ".join(map(str, line.finals)), line.rate, line.chosen, line.rank,
                 line.parameters, line.bytes_up, line.bytes_down, line.seconds]
            )  # fmt: skip
    return buffer.getvalue()
