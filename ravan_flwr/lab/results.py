"""Record the result of each run of a study: a line a run, in a file that may be committed.

A run is identified by its settings, in the record or in its own directory, so that a study
continues from its record alone. The record is JSON, a line a run. If a run has two lines, the later
line counts. `config` is a digest of the resolved settings: if a preset or a default changes, its
runs are repeated. `code` is the version of the code that ran. `data-hash` is the hash of a folder
of data. The line of a failed run has the reason in place of a result, and the run is repeated.
"""

import hashlib
import json
import logging
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from scipy import stats

from ravan_flwr.config.key import did_you_mean
from ravan_flwr.config.yaml_file import KEBAB
from ravan_flwr.files import append, first_error, write_atomically
from ravan_flwr.lab.spec import MIN_SEEDS, PlannedRun
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.history import Curve, client_seconds, make_curve
from ravan_flwr.runs.record import parse_json
from ravan_flwr.tasks import TIME

NAME = "runs.jsonl"  # the record's file name, in the folder of a study
_DIGITS = 6  # significant digits of a curve's numbers, which are only drawn

log = logging.getLogger(__name__)


class Result(BaseModel):
    """The result of a run, with the fields of its line in the record."""

    model_config = KEBAB | ConfigDict(frozen=True, allow_inf_nan=False)

    metric: str
    final: dict[str, int | float]
    learning_rate: int | float
    rank: int | None
    parameters: int  # of the adapters
    bytes_up: int
    bytes_down: int
    seconds: int | float
    client_seconds: int | float | None  # of all clients' training; None: not recorded by the run
    curve: Curve
    rejected: int | None = None  # rejected or missing replies; None: an older record
    code: str | None = None  # the version of the code that ran

    @model_validator(mode="after")
    def _check_complete(self) -> Self:
        if self.metric not in self.final or len({*map(len, self.curve.values())}) > 1:
            raise ValueError("its metric is not among its values, or its curve has gaps")
        return self

    @classmethod
    def of(cls, directory: RunDirectory) -> "Result":
        """Return the result of a finished run, from its directory."""
        summary, rounds = directory.read_summary(), directory.read_rounds()
        # Some private runs do not record them.
        has_seconds = all("seconds" in client for record in rounds for client in record["clients"])
        seconds = round(sum(map(client_seconds, rounds)), 3)
        final: dict[str, float] = dict(summary["metrics"]["final"])
        timed = directory.read_config().get("devices") is not None
        curve = make_curve(rounds, summary["metric"])
        for name in curve.keys() & final.keys():
            curve[name] = [float(f"{value:.{_DIGITS}g}") for value in curve[name]]
        if not timed:
            curve.pop(TIME, None)
        # A run that ended before its target has no time (`ended_too_early`).
        elif "until-metric" not in summary or "reached" in summary:
            final[TIME] = rounds[-1].get("time", 0.0)
        derived = {
            "final": final,
            "parameters": summary["adapter-parameters"],
            "client-seconds": seconds if rounds and has_seconds else None,
            "curve": curve,
        }
        return cls.model_validate({**summary, **derived})

    def ended_too_early(self, metric: str, last: int = 0) -> bool:
        """Return whether the run has no time, since it missed its target, or fewer evaluations."""
        missed = metric == TIME and TIME in self.curve and TIME not in self.final
        return missed or len(self.curve.get("round", [])) < last

    def value(self, metric: str = "", last: int = 0) -> float:
        """Return a metric after the last round, or its mean over the `last` evaluations.

        The default metric is the task's own.
        """
        name = metric or self.metric
        if name not in self.final or (last and len(self.curve.get(name, [])) < last):
            raise ValueError(
                f"metric = {name!r}: got a run that has measured {', '.join(sorted(self.final))}, "
                f"expected this one at {last or 1} evaluations{did_you_mean(name, self.final)} "
                "Correct the table's metric"
            )
        return statistics.mean(self.curve[name][-last:]) if last else self.final[name]


class Results:
    """The results of runs: from the record, or from `folder`, which are then added to it."""

    def __init__(self, folder: Path, record: Path | None = None) -> None:
        self.folder, self.record = folder, record or folder / NAME
        self._lines = _read(self.record)
        self._results: dict[str, Result] = {}  # by run name; their settings match

    def of(self, run: PlannedRun) -> Result | None:
        """Return the run's result, if it is done with the settings as they resolve today."""
        if run.name not in self._results:
            line = self._lines.get(run.name)
            if line and "failed" not in line and line.get("config") == run.digest:
                self._results[run.name] = Result.model_validate(line)
            elif directory := run.directory(self.folder):
                self.add(run, Result.of(RunDirectory(directory)))
        return self._results.get(run.name)

    def add(self, run: PlannedRun, result: Result) -> None:
        """Add the run's result to the record."""
        self._append(run, result.model_dump(by_alias=True))
        self._results[run.name] = result

    def failure(self, run: PlannedRun) -> str | None:
        """Return the reason of the run's failure, if its last attempt failed."""
        line = self._lines.get(run.name, {})
        is_current = "failed" in line and line.get("config") == run.digest
        return str(line["failed"]) if is_current else None

    def add_failure(self, run: PlannedRun, reason: str) -> None:
        """Add the reason of the run's failure to the record."""
        self._append(run, {"failed": reason})

    def _append(self, run: PlannedRun, content: Mapping[str, Any]) -> None:
        """Append a line to the record; it is on disk when this returns."""
        identity = {"run": run.name, "clients": run.num_clients, "settings": str(run)}
        line = {**identity, "config": run.digest, **content}
        if (data := dict(run.settings + run.overrides).get("data")) and Path(str(data)).is_dir():
            line["data-hash"] = _hash_folder(Path(str(data)))
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with self.record.open("ab") as file:
            append(file, json.dumps(line, allow_nan=False).encode() + b"\n")
        self._lines[run.name] = line


@cache
def _hash_folder(folder: Path) -> str:
    """Return the hash of the files of a folder of data: `train.*` first, then by name."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: (path.stem != "train", path)):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Return the lines of a record by run; drop a last line that is cut off."""
    if not path.is_file():
        return {}
    *lines, tail = path.read_bytes().split(b"\n")
    if tail:
        log.warning("%s: its last line is cut off; the run is run again", path)
        write_atomically(path, b"".join(line + b"\n" for line in lines))
    records: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(lines, start=1):
        try:
            line = parse_json(text, finite=True)
            if "failed" not in line:
                Result.model_validate(line)
            records[line["run"]] = line
        except (ValueError, LookupError, TypeError) as error:
            reason = first_error(error) if isinstance(error, ValidationError) else error
            raise ValueError(
                f"{path}: line {number} is {text[:60]!r} ({reason}), expected the result of a run; "
                "restore the file, or take the line out and the run is run again"
            ) from None
    return records


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A mean, the half-width of its interval, and the p-value of the hypothesis that it is zero.

    Fewer than three values have no interval and no p-value.
    """

    mean: float
    half_width: float | None
    p: float | None = None

    @property
    def contains_zero(self) -> bool | None:
        """Return whether the interval contains zero; None without an interval."""
        return None if self.half_width is None else abs(self.mean) <= self.half_width


def interval(values: Sequence[float]) -> Interval:
    """Return the values' mean, with its interval by Student's t."""
    mean, degrees = statistics.mean(values), len(values) - 1
    if len(values) < MIN_SEEDS:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half_width = float(stats.t.ppf((1 + CONFIDENCE) / 2, degrees)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, degrees)) if error else float(mean == 0)
    return Interval(mean, half_width, p)


def difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Return the mean difference of two rows, paired by the seeds that both have; or None."""
    differences = [values[seed] - reference[seed] for seed in values if seed in reference]
    return interval(differences) if differences else None


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Return p-values corrected for multiple tests, by Holm's step-down method (1979)."""
    corrected, floor = {}, 0.0
    for number, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        floor = max(floor, min(1.0, (len(p_values) - number) * p))
        corrected[name] = floor
    return corrected
