"""Plan a study: count its runs, try a round of each table, and estimate how long the rest takes."""

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

from ravan_flwr.lab.choosing import candidates, choose, list_runs, table_runs, unique_runs
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.running import ROUND_LINE, Children, RunOptions, check_missing
from ravan_flwr.lab.spec import PlannedRun, Study, Table, read_study
from ravan_flwr.lab.tables import Page
from ravan_flwr.runs.console import count, minutes
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import Scalar

ASSUMED = (
    "Assumed: each run of a table takes as long as the one that was tried, except for the number "
    "of rounds. Methods differ, and other programs on this machine slow it down"
)

log = logging.getLogger(__name__)


def plan_study(
    path: Path,
    folder: Path,
    options: RunOptions,
    page: Path | None = None,
    overrides: Mapping[str, Scalar] | None = None,
) -> None:
    """Log how many runs a study has, how many of them are done, and how long the others take."""
    study = read_study(path, overrides)
    results = Results(folder, Page.of(page, path, study).record if page else None)
    tables = {table.title: planned_runs(table, results) for table in study.tables}
    runs = unique_runs(run for of_table in tables.values() for run in of_table)
    left = {run.name: run for run in runs if results.of(run) is None}
    log.info("%s: %s, %d of them done", study.title, count(len(runs), "run"), len(runs) - len(left))
    if not left:
        return
    check_missing(study, results)
    seconds, number = 0.0, len(left)
    for title, of_table in tables.items():
        todo = [run for run in of_table if left.pop(run.name, None)]  # not in a table above
        if todo:
            log.info(
                "table %r: %s left; a round is tried: %s", title, count(len(todo), "run"), todo[0]
            )
            times = try_round(todo[0], options)
            log.info("%s", times)
            seconds += sum(map(times.of, todo)) / options.jobs
    log.info("time: about %s, with --jobs %d", minutes(seconds), options.jobs)
    if more := runs_beyond(study, results):
        text = "and %s for each of up to %d more runs, if a best rate is at the edge of its grid"
        log.info(text, minutes(seconds / number), more)
    log.info(ASSUMED)


def planned_runs(table: Table, results: Results) -> list[PlannedRun]:
    """Return all runs of a table; the first rate of the grid stands for one to be chosen."""
    study = Study(table.title, [table])
    unchosen = (
        run
        for row in table.rows.values()
        if row.grid and not list_runs(row, results)
        for run in row.runs(row.grid.values[0])
    )
    return unique_runs([*candidates(study, results), *table_runs(study, results), *unchosen])


def runs_beyond(study: Study, results: Results) -> int:
    """Return how many runs the extensions of grids may add."""
    more = dict[str, int]()  # by run: rows may share their choice
    for row in study.rows:
        choice = choose(row, results)
        if choice and choice.pending:
            added = len(choice.tried) - len(choice.grid.values)
            (first, *_) = (row.rate_source or row).candidates(choice.tried[0])
            more[first.name] = (choice.grid.extensions - added) * len(choice.grid.seeds)
    return sum(more.values())


@dataclass(frozen=True)
class RunTimes:
    """The seconds that the parts of a run take."""

    start: float
    training: float  # of a round
    evaluation: float

    def __str__(self) -> str:
        start, training, evaluation = (
            f"{x:.2g}" if x < 10 else f"{x:.0f}"
            for x in (self.start, self.training, self.evaluation)
        )
        return f"{start} s to start, {training} s to train a round, {evaluation} s to evaluate"

    def of(self, run: PlannedRun) -> float:
        """Return the seconds of a whole run."""
        rounds = run.num_rounds
        evaluations = math.ceil(rounds / int(run.resolved["eval-every"]))
        return self.start + rounds * self.training + evaluations * self.evaluation


def try_round(run: PlannedRun, options: RunOptions) -> RunTimes:
    """Start a run, end it after its first round, and return its times."""
    run = replace(run, overrides=(*run.overrides, ("eval-every", 1)))
    children, begun, ended = Children(), time.monotonic(), 0.0

    def report(line: str) -> None:
        nonlocal ended
        if ROUND_LINE.search(line) and not ended:
            ended = time.monotonic()
            children.end()

    with TemporaryDirectory() as folder:
        last_line = children.run(options.command(run, Path(folder)), options.environment(), report)
        if not ended:
            raise RuntimeError(
                f"study --plan: the time is not estimated, since {run} ended before its first "
                f"round is done: {last_line}"
            )
        (directory,) = run.folder(Path(folder)).iterdir()
        records = RunDirectory(directory).read_rounds()
    first = next(record for record in records if record["round"] == 1)
    evaluation = first["phases"].get("evaluate", 0.0)
    start = max(0.0, ended - begun - first["seconds"])
    return RunTimes(start, first["seconds"] - evaluation, evaluation)
