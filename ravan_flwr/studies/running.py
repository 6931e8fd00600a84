"""Run a study: each run is a process of its own, and what is done already is left alone."""

import logging
import os
import subprocess
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

from ravan_flwr.config.keys import AUTO
from ravan_flwr.specs import Scalar
from ravan_flwr.studies.choosing import candidates, planned
from ravan_flwr.studies.clock import Clock, Work, work_ahead
from ravan_flwr.studies.intervals import LEAST
from ravan_flwr.studies.page import Page
from ravan_flwr.studies.reading import read_study
from ravan_flwr.studies.results import Results
from ravan_flwr.studies.spec import PlannedRun, Study, run_key_values
from ravan_flwr.studies.tables import write_tables
from ravan_flwr.training.cores import CORES, usable_cores
from ravan_flwr.training.gpus import in_turn, visible_gpus

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
        named = [dict(run.settings + run.here).get("device", AUTO) for run in runs]
        return self.engine == "process" and self.jobs > 1 and {*named} <= {AUTO, "cuda"}


def run_study(
    path: Path | str,
    folder: Path | str,
    jobs: int = 1,
    engine: str = "process",
    clients_per_gpu: int | None = None,
    page: Path | str | None = None,
    tables_only: bool = False,
    here: Mapping[str, Scalar] | None = None,
) -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed.

    The tables go into a `page` as well, if one is named, and the record of the runs beside it.
    With `tables_only` nothing is run: the tables show what is done. `here` says where this machine
    has the data, the model and a device; the runs are the same as elsewhere.
    """
    path, folder = Path(path), Path(folder)
    study = read_study(path, here)
    place = Page.of(Path(page), path, study) if page is not None else None
    _warn_of_few_seeds(study)
    results = Results(folder, place.record if place else None)
    if tables_only:
        failed = _told_of(study, results)
    else:
        log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
        failed = _run(study, results, RunOptions(engine, jobs, clients_per_gpu))
    for run, reason in failed.items():
        log.warning("failed: %s: %s", run_key_values(run), reason)
    write_tables(study, results, {run_key_values(run): reason for run, reason in failed.items()})
    log.info("tables: %s", folder / "results.md")
    if place:
        place.write(results)
        log.info("page: %s, with its numbers in %s", place.path, place.folder)
    return not failed


def _warn_of_few_seeds(study: Study) -> None:
    seeds = min((len(row.rate_seeds) for row in study.rows if row.rates), default=LEAST)
    if seeds < LEAST:
        log.warning(
            "learning rates are chosen with %d seed%s, by which a poor one can win by chance; name "
            "%d or more under choose: seeds",
            *(seeds, "s" * (seeds != 1), LEAST),
        )


def _run(study: Study, results: Results, how: RunOptions) -> dict[PlannedRun, str]:
    """Choose learning rates and run the table, one table after the other; return what failed."""
    parts = [Study(study.title, [table]) for table in study.tables]
    work = work_ahead(parts, results)
    clock = Clock(sum((one for pair in work for one in pair), start=Work()))
    failed: dict[PlannedRun, str] = {}
    for part, (choosing, tabling) in zip(parts, work, strict=True):
        clock.later -= choosing
        failed |= _run_candidates(part, results, how, clock)
        clock.later -= tabling
        what = f"table {part.tables[0].title!r}"
        failed |= run_missing(what, planned(part, results), results, how, clock)
    return failed


def _run_candidates(
    part: Study, results: Results, how: RunOptions, clock: Clock
) -> dict[PlannedRun, str]:
    """Measure the rates of the grid, then those beyond its edges, until no row wants another."""
    failed: dict[PlannedRun, str] = {}
    attempted: set[PlannedRun] = set()
    while new := [run for run in candidates(part, results) if run not in attempted]:
        what = "rates beyond an edge" if attempted else "choosing rates"
        failed |= run_missing(what, new, results, how, clock)
        attempted |= set(new)
    return failed


def _told_of(study: Study, results: Results) -> dict[PlannedRun, str]:
    """Say how many runs are not done; return those that failed when they were last tried."""
    runs = [*candidates(study, results), *planned(study, results)]
    lacking = [run for run in runs if results.of(run) is None]
    failed = {run: reason for run in lacking if (reason := results.failure(run)) is not None}
    log.info("%s: %d runs of %d are not done; nothing is run", study.title, len(lacking), len(runs))
    return failed


def run_missing(
    what: str, runs: Sequence[PlannedRun], results: Results, how: RunOptions, clock: Clock
) -> dict[PlannedRun, str]:
    """Run those that are not done; return those that failed, with the reason."""
    todo = [run for run in runs if results.of(run) is None]
    log.info("%s: %d runs, %d of them done", what, len(runs), len(runs) - len(todo))
    environment = dict(os.environ)
    if how.jobs > 1:  # side by side they share the cores; a number of the user's is kept
        environment[CORES] = str(max(1, usable_cores() // how.jobs))
    places: SimpleQueue[dict[str, str]] = SimpleQueue()
    for place in in_turn(visible_gpus() if how.divides_gpus(todo) else [], how.jobs):
        places.put(place)
    failed: dict[PlannedRun, str] = {}
    now = sum((Work(1, run.num_rounds) for run in todo), start=Work())

    def execute(run: PlannedRun) -> tuple[bool, str]:
        place = places.get()
        try:
            return children.run(how.command(run, results.folder), environment | place)
        finally:
            places.put(place)

    children, pool = _Children(), ThreadPoolExecutor(how.jobs)
    try:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, (well, last) = waiting[future], future.result()
            work, result = Work(1, run.num_rounds), results.of(run)
            now -= work
            left = clock.left(work, result.seconds if result else 0.0, now, how.jobs)
            log.info("%d/%d  left %s  %s: %s", number, len(todo), left, run_key_values(run), last)
            if not well:
                failed[run] = last
            if result is None:
                results.note_failure(run, last)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # no further run begins
        children.end()
        raise
    finally:
        pool.shutdown()
    return failed


class _Children:
    """Starts the processes of runs, each in a thread that waits for it, and can end all."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._ended = False

    def run(self, command: list[str], environment: dict[str, str]) -> tuple[bool, str]:
        """Run a command; return whether it succeeded, and the last line that it wrote."""
        try:
            with self._lock:
                if self._ended:
                    return False, "the study was ended"
                child = subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                )
                self._running.add(child)
        except OSError as error:
            return False, str(error)
        said = child.communicate()
        with self._lock:
            self._running.discard(child)
        well = child.returncode == 0
        told = said[0 if well else 1].strip().splitlines()
        told = told or [f"it ended with status {child.returncode} and said nothing"]
        return well, next((line for line in reversed(told) if line.startswith("done")), told[-1])

    def end(self) -> None:
        """Ask all processes to end; their threads return when they have."""
        with self._lock:
            self._ended = True
            for child in self._running:
                child.terminate()
