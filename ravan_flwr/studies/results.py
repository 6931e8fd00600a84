"""Keep what each run of a study has come to: a line a run, in a file that may be committed.

A run is found again by its settings, in the record or in its own directory, so that a study goes
on from its record alone. The record is JSON, a line a run; of two lines for one run the later
counts. `config` is a digest of the settings as they resolved: if a preset changes, or a default,
its runs are run again. `code` is the version of the code that the run had, `data-hash` that of a
folder of data. A run that failed has a line with the reason in place of a result, and is tried
again.
"""

import hashlib
import json
import logging
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Self

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from scipy import stats

from ravan_flwr.config.yaml_file import KEBAB
from ravan_flwr.files import first_wrong
from ravan_flwr.runs.directory import RunDirectory, write_atomically
from ravan_flwr.runs.history import Curve, client_seconds, curve_of
from ravan_flwr.studies.spec import LEAST, PlannedRun
from ravan_flwr.tasks import TIME

NAME = "runs.jsonl"  # of the record, in the folder of a study
_DIGITS = 6  # of the numbers of a curve, which are drawn

log = logging.getLogger(__name__)


class Result(BaseModel):
    """Hold what a run has come to, as its line in the record has it."""

    model_config = KEBAB | ConfigDict(frozen=True, allow_inf_nan=False)

    metric: str
    final: dict[str, int | float]
    learning_rate: int | float
    rank: int | None
    parameters: int  # of the adapters
    bytes_up: int
    bytes_down: int
    seconds: int | float
    client_seconds: int | float | None  # of all clients' training; None: the run has not noted it
    curve: Curve
    code: str | None = None  # the version of the code that ran

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.metric not in self.final or len({*map(len, self.curve.values())}) > 1:
            raise ValueError("its metric is not among its values, or its curve has gaps")
        return self

    @classmethod
    def of(cls, directory: RunDirectory) -> "Result":
        """Read it from the directory of a run that is done."""
        summary, rounds = directory.read_summary(), directory.read_rounds()
        # Not told in some private runs.
        has_seconds = all("seconds" in client for record in rounds for client in record["clients"])
        seconds = round(sum(map(client_seconds, rounds)), 3)
        final: dict[str, float] = dict(summary["metrics"]["final"])
        timed = directory.read_config().get("devices") is not None
        curve = curve_of(rounds, summary["metric"])
        for name in curve.keys() & final.keys():
            curve[name] = [float(f"{value:.{_DIGITS}g}") for value in curve[name]]
        if not timed:
            curve.pop(TIME, None)
        # A run that was to reach a target, and has not, would have taken longer (`missed`).
        elif "until-metric" not in summary or "reached" in summary:
            final[TIME] = rounds[-1].get("time", 0.0)
        own = {
            "final": final,
            "parameters": summary["adapter-parameters"],
            "client-seconds": seconds if rounds and has_seconds else None,
            "curve": curve,
        }
        return cls.model_validate({**summary, **own})

    def missed(self, metric: str) -> bool:
        """Tell whether it has no time, as a run with devices that has ended before its target."""
        return metric == TIME and TIME in self.curve and TIME not in self.final

    def value(self, metric: str = "", last: int = 0) -> float:
        """Return a metric after the last round, or its mean over so many evaluations.

        That is the task's own metric where none is named.
        """
        name = metric or self.metric
        if name not in self.final or (last and len(self.curve.get(name, [])) < last):
            raise ValueError(
                f"a run has measured {sorted(self.final)}, expected {name!r} at {last or 1} "
                "evaluations; evaluate it" + " (time: set devices)" * (name == TIME)
            )
        return statistics.mean(self.curve[name][-last:]) if last else self.final[name]


class Results:
    """Find the results of runs: in the record, or in `folder`, from where they come into it."""

    def __init__(self, folder: Path, record: Path | None = None) -> None:
        self.folder, self.record = folder, record or folder / NAME
        self._lines = _read(self.record)
        self._results: dict[str, Result] = {}  # of which the settings are compared already

    def of(self, run: PlannedRun) -> Result | None:
        """Find how the run ended, if it is done with the settings as they resolve today."""
        if run.name not in self._results:
            line = self._lines.get(run.name)
            if line and "failed" not in line and line.get("config") == run.digest:
                self._results[run.name] = Result.model_validate(line)
            elif directory := run.directory(self.folder):
                self.note(run, Result.of(RunDirectory(directory)))
        return self._results.get(run.name)

    def note(self, run: PlannedRun, result: Result) -> None:
        """Note what the run has come to."""
        self._append(run, result.model_dump(by_alias=True))
        self._results[run.name] = result

    def failure(self, run: PlannedRun) -> str | None:
        """Find why the run failed, if it did when it was last tried."""
        line = self._lines.get(run.name, {})
        is_current = "failed" in line and line.get("config") == run.digest
        return str(line["failed"]) if is_current else None

    def note_failure(self, run: PlannedRun, reason: str) -> None:
        """Note why the run failed."""
        self._append(run, {"failed": reason})

    def _append(self, run: PlannedRun, content: Mapping[str, Any]) -> None:
        """Add a line, on disk when this returns."""
        named = {"run": run.name, "clients": run.num_clients, "settings": str(run)}
        line = {**named, "config": run.digest, **content}
        if (data := dict(run.settings + run.overrides).get("data")) and Path(str(data)).is_dir():
            line["data-hash"] = _hash_of(Path(str(data)))
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines[run.name] = line


@cache
def _hash_of(folder: Path) -> str:
    """Hash the files of a folder of data, the training part first, then by name."""
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*"), key=lambda path: (path.stem != "train", path)):
        if path.is_file():
            with path.open("rb") as file:
                hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the lines of a record by run; a last one that was cut off is dropped."""
    if not path.is_file():
        return {}
    *lines, tail = path.read_bytes().split(b"\n")
    if tail:
        log.warning("%s: its last line is cut off; the run is run again", path)
        write_atomically(path, b"".join(line + b"\n" for line in lines))
    records: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(lines, start=1):
        try:
            line = json.loads(text.decode(), parse_constant=_refused)
            if "failed" not in line:
                Result.model_validate(line)
            records[line["run"]] = line
        except (ValueError, LookupError, TypeError) as error:
            why = first_wrong(error) if isinstance(error, ValidationError) else error
            raise ValueError(
                f"{path}: line {number} is {text[:60]!r} ({why}), expected the result of a run; "
                "restore the file, or take the line out and the run is run again"
            ) from None
    return records


CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """Hold a mean, how far its interval reaches to both sides, and the p-value that it is zero.

    Of fewer than three values there are no interval and no p-value.
    """

    mean: float
    half: float | None
    p: float | None = None

    @property
    def holds_zero(self) -> bool | None:
        """Tell whether zero lies in it; None where there is no interval."""
        return None if self.half is None else abs(self.mean) <= self.half


def interval(values: Sequence[float]) -> Interval:
    """Compute the interval of the values' mean."""
    mean, freedom = statistics.mean(values), len(values) - 1
    if len(values) < LEAST:
        return Interval(mean, None)
    error = statistics.stdev(values) / math.sqrt(len(values))
    half = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p = 2 * float(stats.t.sf(abs(mean) / error, freedom)) if error else float(mean == 0)
    return Interval(mean, half, p)


def difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Interval | None:
    """Compute the interval of the mean difference of two rows, by the seeds that both have."""
    differences = [values[seed] - reference[seed] for seed in values if seed in reference]
    return interval(differences) if differences else None


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Correct p-values for their number, by Holm's step-down method (1979)."""
    corrected, least = {}, 0.0
    for number, (name, p) in enumerate(sorted(p_values.items(), key=lambda item: item[1])):
        least = max(least, min(1.0, (len(p_values) - number) * p))
        corrected[name] = least
    return corrected
