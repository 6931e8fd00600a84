"""Run a study: each run is a process of its own, and what is done already is left alone."""

import logging
import os
import subprocess
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.words import words_of
from ravan_flwr.specs import THREAD_NUMBERS
from ravan_flwr.studies.clock import Clock, Work
from ravan_flwr.studies.reading import read_study
from ravan_flwr.studies.spec import PlannedRun, Row
from ravan_flwr.studies.tables import write_tables
from ravan_flwr.training.cores import CORES, usable_cores

log = logging.getLogger(__name__)


def run_study(
    path: Path | str,
    folder: Path | str,
    jobs: int = 1,
    engine: str = "process",
    clients_per_gpu: int | None = None,
) -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed."""
    path, folder = Path(path), Path(folder)
    study = read_study(path)
    log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
    how = How(engine, jobs, clients_per_gpu)
    clock = Clock(sum(map(_work_of, study.rows), start=Work()))
    failed: dict[PlannedRun, str] = {}
    if candidates := study.candidates():
        failed |= run_missing("choosing learning rates", candidates, folder, how, clock)
    tables = study.runs(folder)
    clock.later = Work()
    failed |= run_missing("the tables", tables, folder, how, clock)
    for run, reason in failed.items():
        log.warning("failed: %s: %s", words_of_run(run), reason)
    write_tables(study, folder, {words_of_run(run): reason for run, reason in failed.items()})
    log.info("tables: %s", folder / "results.md")
    return not failed


def _work_of(row: Row) -> Work:
    """Count a row's runs, all seeds together."""
    config = read_config(own_preset({"learning-rate": 1.0, **row.settings}))
    return Work(len(row.seeds), len(row.seeds) * config.num_rounds)


@dataclass(frozen=True)
class How:
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


def run_missing(
    what: str, runs: Sequence[PlannedRun], folder: Path, how: How, clock: Clock
) -> dict[PlannedRun, str]:
    """Run those that are not done; return those that failed, with the reason."""
    todo = [run for run in runs if run.summary(folder) is None]
    log.info("%s: %d runs, %d of them done", what, len(runs), len(runs) - len(todo))
    # Side by side they share the cores; alone a run decides, and a number of the user's is kept.
    environment = dict(os.environ)
    if how.jobs > 1:
        share = str(max(1, usable_cores() // how.jobs))
        environment[CORES] = share
        if not any(os.environ.get(name) for name in THREAD_NUMBERS):
            environment["OMP_NUM_THREADS"] = share
    failed: dict[PlannedRun, str] = {}
    now = sum((Work(1, run.num_rounds) for run in todo), start=Work())

    def execute(run: PlannedRun) -> tuple[bool, str]:
        return children.run(how.command(run, folder), environment)

    children, pool = _Children(), ThreadPoolExecutor(how.jobs)
    try:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, (well, last) = waiting[future], future.result()
            work, summary = Work(1, run.num_rounds), run.summary(folder)
            now -= work
            left = clock.left(work, summary["seconds"] if summary else 0.0, now, how.jobs)
            log.info("%d/%d  left %s  %s: %s", number, len(todo), left, words_of_run(run), last)
            if not well:
                failed[run] = last
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


def words_of_run(run: PlannedRun) -> str:
    """Write a run's settings as a person types them."""
    return " ".join(words_of(dict(run.settings)))
