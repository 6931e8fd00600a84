"""Running a study: each run a process of its own, what is done already left alone."""

import logging
import os
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path

from ravan_flwr.console import minutes
from ravan_flwr.studies.spec import Run, read_study
from ravan_flwr.studies.tables import write_tables

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
    how = _How(engine, jobs, clients_per_gpu)
    clock = _Clock(sum(len(row.seeds) for row in study.rows))
    failed: dict[Run, str] = {}
    if candidates := study.candidates():
        failed |= _run_missing("choosing learning rates", candidates, folder, how, clock)
    tables = study.runs(folder)
    clock.later = 0
    failed |= _run_missing("the tables", tables, folder, how, clock)
    for run, reason in failed.items():
        log.warning("failed: %s: %s", _words(run), reason)
    write_tables(study, folder, {_words(run): reason for run, reason in failed.items()})
    log.info("tables: %s", folder / "results.md")
    return not failed


@dataclass(frozen=True)
class _How:
    """The engine, how many runs are at work at a time, and what each may take of a GPU."""

    engine: str
    jobs: int
    clients_per_gpu: int | None

    def command(self, run: Run, folder: Path) -> list[str]:
        """Of one run."""
        command = run.command(folder, self.engine)
        if self.engine != "flower":
            return command
        command += ["--runs-at-a-time", str(self.jobs)]
        if self.clients_per_gpu is not None:
            command += ["--clients-per-gpu", str(self.clients_per_gpu)]
        return command


@dataclass
class _Clock:
    """How long runs take, for the time left over the whole study."""

    later: int  # runs of the tables, while learning rates are chosen
    done: int = 0
    started: float = field(default_factory=time.monotonic)

    def left(self, now: int) -> str:
        """The time for so many runs of this part, and for those of the next."""
        self.done += 1
        return minutes((time.monotonic() - self.started) / self.done * (now + self.later))


def _run_missing(
    what: str, runs: list[Run], folder: Path, how: _How, clock: _Clock
) -> dict[Run, str]:
    """Run those that are not done; those that failed, with the reason."""
    todo = [run for run in runs if run.summary(folder) is None]
    log.info("%s: %d runs, %d of them done", what, len(runs), len(runs) - len(todo))
    threads = max(1, (os.cpu_count() or 1) // how.jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    failed: dict[Run, str] = {}

    def execute(run: Run) -> tuple[bool, str]:
        """Whether it went well, and the last thing that it said."""
        command = how.command(run, folder)
        try:
            ended = subprocess.run(
                command, env=environment, check=False, capture_output=True, text=True
            )
        except OSError as error:
            return False, str(error)
        well = ended.returncode == 0
        told = (ended.stdout if well else ended.stderr).strip().splitlines()
        told = told or [f"it ended with status {ended.returncode} and said nothing"]
        return well, next((line for line in reversed(told) if line.startswith("done")), told[-1])

    pool = ThreadPoolExecutor(how.jobs)
    try:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, (well, last) = waiting[future], future.result()
            log.info(
                "%d/%d  left %s  %s: %s",
                number, len(todo), clock.left(len(todo) - number), _words(run), last,
            )  # fmt: skip
            if not well:
                failed[run] = last
    finally:
        pool.shutdown(cancel_futures=True)  # an interrupted study begins no further run
    return failed


def _words(run: Run) -> str:
    return " ".join(f"{key}={value}" for key, value in run.settings)
