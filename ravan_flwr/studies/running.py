"""Run a study: each run is a process of its own, and what is done already is left alone."""

import logging
import os
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ravan_flwr.config.key import AUTO
from ravan_flwr.runs.console import minutes
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.choosing import candidates, each_once, planned
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import LEAST, PlannedRun, Study, read_study
from ravan_flwr.studies.tables import Page, write_tables
from ravan_flwr.training.machine import CORES, in_turn, usable_cores, visible_gpus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The engine, how many runs are at work at a time, and what each may take of a GPU."""

    engine: str = "process"
    jobs: int = 1
    clients_per_gpu: int | None = None

    def command(self, run: PlannedRun, folder: Path) -> list[str]:
        """Build the command of one run."""
        command = run.command(folder, self.engine)
        if self.engine != "flower":
            return command
        command += ["--runs-at-a-time", str(self.jobs)]
        if self.clients_per_gpu is not None:
            command += ["--clients-per-gpu", str(self.clients_per_gpu)]
        return command

    def divides_gpus(self, runs: Sequence[PlannedRun]) -> bool:
        """Tell whether each run at work has GPUs of its own; not where a run names its device."""
        named = [dict(run.settings + run.overrides).get("device", AUTO) for run in runs]
        return self.engine == "process" and self.jobs > 1 and {*named} <= {AUTO, "cuda"}


def run_study(
    path: Path | str,
    folder: Path | str,
    jobs: int = 1,
    engine: str = "process",
    clients_per_gpu: int | None = None,
    page: Path | str | None = None,
    tables_only: bool = False,
    overrides: Mapping[str, Scalar] | None = None,
) -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed.

    The tables go into a `page` as well, if one is named, and the record of the runs beside it.
    With `tables_only` nothing is run: the tables show what is done. `overrides` says where this
    machine has the data, the model and a device; the runs are the same as elsewhere.
    """
    path, folder = Path(path), Path(folder)
    study = read_study(path, overrides)
    place = Page.of(Path(page), path, study) if page is not None else None
    _warn_of_few_seeds(study)
    results = Results(folder, place.record if place else None)
    if not tables_only:
        log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
        run_missing(study, results, RunOptions(engine, jobs, clients_per_gpu))
    runs = each_once([*candidates(study, results), *planned(study, results)])
    lacking = [run for run in runs if results.of(run) is None]
    nothing = "; nothing is run" * tables_only
    log.info("%s: %d runs of %d are not done%s", study.title, len(lacking), len(runs), nothing)
    failed = {str(run): reason for run in lacking if (reason := results.failure(run)) is not None}
    for run, reason in failed.items():
        log.warning("failed: %s: %s", run, reason)
    write_tables(study, results, failed)
    log.info("tables: %s", folder / "results.md")
    if place:
        place.write(results)
        log.info("page: %s, with its numbers in %s", place.path, place.folder)
    return not failed


def _warn_of_few_seeds(study: Study) -> None:
    rungs = [rung for row in study.rows if row.grid for rung in row.grid.rungs]
    seeds = min((len(rung.seeds) for rung in rungs), default=LEAST)
    if seeds < LEAST:
        log.warning(
            "learning rates are chosen with %d seed%s, by which a poor one can win by chance; name "
            "%d or more under choose: seeds",
            *(seeds, "s" * (seeds != 1), LEAST),
        )


def run_missing(study: Study, results: Results, options: RunOptions) -> None:
    """Run what is not done, table by table: rates first, until no row wants another.

    What a run has come to, and why one failed, is in `results` afterwards.
    """
    attempted: set[PlannedRun] = set()
    for table in study.tables:
        part = Study(study.title, [table])
        while True:
            for runs in (candidates(part, results), planned(part, results)):
                todo = [run for run in runs if not (results.of(run) or run in attempted)]
                if todo:
                    break
            runs_done = len(runs) - len(todo)
            log.info("table %r: %d runs, %d of them done", table.title, len(runs), runs_done)
            if not todo:
                break
            _run(todo, results, options)
            attempted |= set(todo)


def _run(todo: Sequence[PlannedRun], results: Results, options: RunOptions) -> None:
    """Run these, and log after each how long the rest of them may take."""
    environment = dict(os.environ)
    if options.jobs > 1:  # side by side they share the cores; a number of the user's is kept
        environment[CORES] = str(max(1, usable_cores() // options.jobs))
    places: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in in_turn(visible_gpus() if options.divides_gpus(todo) else [], options.jobs):
        places.put(place)

    def execute(run: PlannedRun) -> str:
        place = places.get()
        try:
            return children.run(options.command(run, results.folder), environment | place)
        finally:
            places.put(place)

    children, pool = _Children(), ThreadPoolExecutor(options.jobs)
    started, rounds_done, rounds = time.monotonic(), 0, sum(run.num_rounds for run in todo)
    try:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, last = waiting[future], future.result()
            rounds_done += run.num_rounds
            left = minutes((time.monotonic() - started) / rounds_done * (rounds - rounds_done))
            if results.of(run) is None:
                results.note_failure(run, last)
            log.info("%d/%d  left %s  %s: %s", number, len(todo), left, run, last)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # no further run begins
        children.end()
        raise
    finally:
        pool.shutdown()


class _Children:
    """Starts the processes of runs, each in a thread that waits for it, and can end all."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._started: list[subprocess.Popen[str]] = []

    def run(self, command: list[str], environment: dict[str, str]) -> str:
        """Run a command; return the last line that it wrote."""
        nothing, pipe = subprocess.DEVNULL, subprocess.PIPE
        with self._lock:
            if self._ended:
                return "the study was ended"
            try:
                child = subprocess.Popen(
                    command, env=environment, text=True, stdin=nothing, stdout=pipe, stderr=pipe
                )
            except OSError as error:
                return str(error)
            self._started.append(child)
        lines = child.communicate()[child.returncode != 0].strip().splitlines()
        lines = lines or [f"it ended with status {child.returncode} and said nothing"]
        return next((line for line in reversed(lines) if line.startswith("done")), lines[-1])

    def end(self) -> None:
        """Ask all processes to end; their threads return when they have."""
        with self._lock:
            self._ended = True
            for child in self._started:
                child.terminate()  # which does nothing to one that has ended
