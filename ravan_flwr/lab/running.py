"""Run a study: each run is a process of its own, and finished runs are not repeated."""

import logging
import os
import re
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from statistics import fmean
from tempfile import TemporaryFile
from typing import IO, cast

from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import as_key_values
from ravan_flwr.config.presets import with_preset_path
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab.choosing import candidates, table_runs, unique_runs
from ravan_flwr.lab.results import Results
from ravan_flwr.lab.spec import PlannedRun, Study, read_study
from ravan_flwr.lab.tables import Page, write_tables
from ravan_flwr.runs.console import minutes
from ravan_flwr.specs import Scalar
from ravan_flwr.training.machine import CORES, assign_gpus, usable_cores, visible_gpus

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunOptions:
    """The engine, the number of concurrent runs, and the number of clients on a GPU."""

    engine: str = "process"
    jobs: int = 1
    clients_per_gpu: int | None = None

    def command(self, run: PlannedRun, folder: Path) -> list[str]:
        """Return the command of one run."""
        command = run.command(folder, self.engine)
        if self.engine != "flower":
            return command
        command += ["--runs-at-a-time", str(self.jobs)]
        if self.clients_per_gpu is not None:
            command += ["--clients-per-gpu", str(self.clients_per_gpu)]
        return command

    def environment(self) -> dict[str, str]:
        """Return the environment of a run: concurrent runs share the cores."""
        environment = dict(os.environ)
        if self.jobs > 1:  # a limit in the environment still applies
            environment[CORES] = str(max(1, usable_cores() // self.jobs))
        return environment

    def divides_gpus(self, runs: Sequence[PlannedRun]) -> bool:
        """Return whether concurrent runs divide the GPUs; not if a run sets its own device."""
        devices = [dict(run.settings + run.overrides).get("device", AUTO) for run in runs]
        return self.engine == "process" and self.jobs > 1 and {*devices} <= {AUTO, "cuda"}


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
    """Run the missing runs, `jobs` at a time, and write the tables; return True if none failed.

    With a `page`, its tables are written too, and the record of the runs is beside it. With
    `tables_only` nothing is run: the tables show the finished runs. `overrides` has this machine's
    data, model and device; they do not change which runs the study has.
    """
    path, folder = Path(path), Path(folder)
    study = read_study(path, overrides)
    result_page = Page.of(Path(page), path, study) if page is not None else None
    results = Results(folder, result_page.record if result_page else None)
    if not tables_only:
        log.info("%s: %d at a time; folder %s", study.title, jobs, folder)
        check_missing(study, results)
        run_missing(study, results, RunOptions(engine, jobs, clients_per_gpu))
    runs = unique_runs([*candidates(study, results), *table_runs(study, results)])
    missing = [run for run in runs if results.of(run) is None]
    suffix = "; nothing is run" * tables_only
    # Runs with rates that are still to be chosen are not known yet.
    at_least = "at least " * bool(missing and any(row.grid for row in study.rows))
    numbers = at_least, len(missing), len(runs)
    log.info("%s: %s%d runs of %d are not done%s", study.title, *numbers, suffix)
    failed = {
        f"num-clients={run.num_clients} {run}": reason  # rows may differ in nothing else
        for run in missing
        if (reason := results.failure(run)) is not None
    }
    for words, reason in failed.items():
        log.warning("failed: %s: %s", words, reason)
    write_tables(study, results, failed)
    log.info("tables: %s", folder / "results.md")
    if result_page:
        result_page.write(results)
        log.info("page: %s, with its numbers in %s", result_page.path, result_page.folder)
    return not failed


def check_missing(study: Study, results: Results) -> None:
    """Raise ValueError if the settings of a missing run do not fit its model or its data."""
    rows: dict[tuple[object, ...], PlannedRun] = {}  # one run of each row: seeds change no shape
    for run in [*candidates(study, results), *table_runs(study, results)]:
        if results.of(run) is None:
            settings = dict(run.settings) | dict(run.overrides) | {"seed": 0}
            rows.setdefault((run.num_clients, *sorted(settings.items())), run)
    if not rows:
        return
    from ravan_flwr.server.stop_conditions import check_limits  # noqa: PLC0415 (imports torch)
    from ravan_flwr.training.clients import number_of_clients  # noqa: PLC0415
    from ravan_flwr.training.cost import Skeleton  # noqa: PLC0415

    for run in rows.values():
        try:
            config = read_config(with_preset_path(dict(run.settings) | dict(run.overrides)))
            config = replace(config, num_clients=number_of_clients(config, run.num_clients))
            check_limits(config, Skeleton(config).task.metric, [])
        except ValueError as error:
            raise ValueError(f"study: {run}: {error}") from None


def run_missing(study: Study, results: Results, options: RunOptions) -> None:
    """Run the missing runs, table by table: first those that choose rates, then the table's own.

    Afterwards `results` has the result, or the reason of the failure, of each run.
    """
    attempted: set[PlannedRun] = set()
    for table in study.tables:
        table_study = Study(study.title, [table])
        while True:
            for list_of in (candidates, table_runs):
                runs = list_of(table_study, results)
                todo = [run for run in runs if not (results.of(run) or run in attempted)]
                if todo:
                    break
            runs_done = len(runs) - len(todo)
            if runs:
                log.info("table %r: %d runs, %d of them done", table.title, len(runs), runs_done)
            if not todo:
                break
            _run(todo, _names(runs), results, options)
            attempted |= set(todo)


def _run(
    todo: Sequence[PlannedRun],
    names: Mapping[PlannedRun, str],
    results: Results,
    options: RunOptions,
) -> None:
    """Run these runs, and log after each round and run the estimated time left."""
    environment = options.environment()
    gpu_slots: SimpleQueue[dict[str, str]] = SimpleQueue()
    for gpu_slot in assign_gpus(visible_gpus() if options.divides_gpus(todo) else [], options.jobs):
        gpu_slots.put(gpu_slot)

    def execute(run: PlannedRun) -> str:
        gpu_slot = gpu_slots.get()
        try:
            clock.begin(run)
            command = options.command(run, results.folder)
            return children.run(command, environment | gpu_slot, partial(report, run))
        finally:
            gpu_slots.put(gpu_slot)

    def report(run: PlannedRun, line: str) -> None:
        if match := ROUND_LINE.search(line):
            left = minutes(clock.round(run, float(match["seconds"])))
            log.info(
                "%d/%d  left %s  %s: %s", todo.index(run) + 1, len(todo), left, names[run], match[1]
            )

    children, pool = Children(), ThreadPoolExecutor(options.jobs)
    clock = _Clock(todo, options.jobs)
    try:
        waiting = {pool.submit(execute, run): run for run in todo}
        for number, future in enumerate(as_completed(waiting), start=1):
            run, last_line = waiting[future], future.result()
            left = minutes(clock.end(run))
            if results.of(run) is None:
                results.add_failure(run, last_line)
            log.info("%d/%d  left %s  %s: %s", number, len(todo), left, names[run], last_line)
    except BaseException:
        pool.shutdown(wait=False, cancel_futures=True)  # start no further run
        children.end()
        raise
    finally:
        pool.shutdown()


def _names(runs: Sequence[PlannedRun]) -> dict[PlannedRun, str]:
    """Return the settings in which each of several runs differs from others, for the log."""
    common = set.intersection(*(set(run.settings) for run in runs))
    own = {run: {k: v for k, v in run.settings if (k, v) not in common} for run in runs}
    return {run: " ".join(as_key_values(settings)) or str(run) for run, settings in own.items()}


# What a run logs for each round, by `runs.console.Progress`.
ROUND_LINE = re.compile(r"(round +\d+/\d+  .*?  (?P<seconds>\d+\.\d) s)  left ")


class _Clock:
    """Estimate the time left of many runs: of their rounds, and of a start and an end of each.

    Rounds take the mean time of those so far. A run takes its other time, in which it loads its
    model and writes its result, as the mean of the runs so far.
    """

    def __init__(self, todo: Sequence[PlannedRun], jobs: int) -> None:
        self._left = {run: run.num_rounds for run in todo}  # rounds
        self._jobs = jobs
        self._begun: dict[PlannedRun, float] = {}
        self._rounds: dict[PlannedRun, list[float]] = {}  # seconds
        self._others: dict[PlannedRun, float] = {}  # seconds so far in no round
        self._lock = threading.Lock()

    def begin(self, run: PlannedRun) -> None:
        """Note that a run begins."""
        with self._lock:
            self._begun[run], self._rounds[run] = time.monotonic(), []

    def round(self, run: PlannedRun, seconds: float) -> float:
        """Note a round; return the seconds left of all runs."""
        with self._lock:
            self._rounds[run].append(seconds)
            self._left[run] = max(0, self._left[run] - 1)
            return self._estimate(run)

    def end(self, run: PlannedRun) -> float:
        """Note that a run has ended, maybe before its last round; return the seconds left."""
        with self._lock:
            self._left[run] = 0
            return self._estimate(run)

    def _estimate(self, run: PlannedRun) -> float:
        passed = time.monotonic() - self._begun[run]
        self._others[run] = max(0.0, passed - sum(self._rounds[run]))
        rounds = [seconds for of_run in self._rounds.values() for seconds in of_run]
        to_begin = len(self._left) - len(self._begun)
        left = fmean(rounds or [0.0]) * sum(self._left.values())
        return (left + fmean(self._others.values()) * to_begin) / self._jobs


class Children:
    """Start the processes of runs, each in a thread that waits for it, and terminate them."""

    def __init__(self) -> None:
        self._lock, self._ended = threading.Lock(), False
        self._started: list[subprocess.Popen[str]] = []

    def run(
        self, command: list[str], environment: dict[str, str], report: Callable[[str], None]
    ) -> str:
        """Run a command; return its line that starts with "done", else the last line.

        `report` is called with each line of its output when it comes.
        """
        devnull, pipe = subprocess.DEVNULL, subprocess.PIPE
        with TemporaryFile("w+") as errors:
            with self._lock:
                if self._ended:
                    return "the study was ended"
                try:
                    child = subprocess.Popen(
                        command, env=environment, text=True, stdin=devnull, stdout=pipe,
                        stderr=errors,
                    )  # fmt: skip
                except OSError as error:
                    return str(error)
                self._started.append(child)
            lines = []
            with child:
                for line in cast(IO[str], child.stdout):
                    report(line)
                    lines.append(line)
            if child.returncode:
                errors.seek(0)
                lines = errors.readlines()
        lines = "".join(lines).strip().splitlines()
        lines = lines or [f"it ended with status {child.returncode} and said nothing"]
        return next((line for line in reversed(lines) if line.startswith("done")), lines[-1])

    def end(self) -> None:
        """Terminate all processes; their threads return when the processes have ended."""
        with self._lock:
            self._ended = True
            for child in self._started:
                child.terminate()  # no effect on a process that has ended
