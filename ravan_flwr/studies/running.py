"""Running a study: each run a process of its own, what is done already left alone."""

import logging
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ravan_flwr.console import minutes
from ravan_flwr.studies.spec import Run, read_study
from ravan_flwr.studies.tables import write_tables

log = logging.getLogger(__name__)


def run_study(path: Path, folder: Path, jobs: int = 1, engine: str = "process") -> bool:
    """Run what is not done yet, `jobs` at a time, and write the tables; True if none failed."""
    study = read_study(path)
    log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
    failed: dict[Run, str] = {}
    if candidates := study.candidates():
        failed |= _run_missing("choosing learning rates", candidates, folder, jobs, engine)
    failed |= _run_missing("the tables", study.runs(folder), folder, jobs, engine)
    write_tables(study, folder)
    for run, reason in failed.items():
        log.warning("failed: %s: %s", " ".join(f"{k}={v}" for k, v in run.settings), reason)
    log.info("tables: %s", folder / "results.md")
    return not failed


def _run_missing(
    what: str, runs: list[Run], folder: Path, jobs: int, engine: str
) -> dict[Run, str]:
    """Run those that are not done; those that failed, with the reason."""
    todo = [run for run in runs if run.summary(folder) is None]
    log.info("%s: %d runs, %d of them done", what, len(runs), len(runs) - len(todo))
    return dict(_run_all(todo, folder, jobs, engine))


def _run_all(todo: list[Run], folder: Path, jobs: int, engine: str) -> Iterator[tuple[Run, str]]:
    """Run all; yield those that failed with the reason."""
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = os.environ | {"OMP_NUM_THREADS": str(threads)}
    started = time.monotonic()

    def execute(run: Run) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            run.command(folder, engine),
            env=environment,
            check=False,
            capture_output=True,
            text=True,
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
