"""Keep what each run of a study has come to: a line a run, in a file that may be committed.

A run is found again by its settings, in the record or in its own directory, so that a study goes
on from its record alone. The record is JSON, a line a run; of two lines for one run the later
counts. `config` is a digest of the settings as they resolved: if a preset changes, or a default,
its runs are run again. A run that failed has a line with the reason in place of a result, and is
tried again.
"""

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import KEYS
from ravan_flwr.runs.directory import RunDirectory, write_atomically
from ravan_flwr.runs.record import RoundRecord, Summary
from ravan_flwr.studies.spec import PlannedRun, run_key_values

NAME = "runs.jsonl"  # of the record, in the folder of a study
_DIGITS = 6  # of the numbers of a curve, which are drawn

log = logging.getLogger(__name__)

Curve = Mapping[str, list[float]]  # round, bytes, client-seconds and each metric, evaluated rounds


@dataclass(frozen=True)
class Result:
    """Hold what a run has come to, as its line in the record has it."""

    metric: str
    final: Mapping[str, float]
    learning_rate: float
    rank: int | None
    parameters: int  # of the adapters
    bytes_up: int
    bytes_down: int
    seconds: float
    client_seconds: float | None  # of all clients' training; None: the run has not noted it
    curve: Curve

    @classmethod
    def of(cls, directory: RunDirectory) -> "Result":
        """Read it from the directory of a run that is done."""
        summary, rounds = directory.read_summary(), directory.read_rounds()
        clients = [client for one in rounds for client in one["clients"]]
        known = all("seconds" in client for client in clients)  # not told in some private runs
        spent = [sum(client.get("seconds", 0.0) for client in one["clients"]) for one in rounds]
        return cls(
            metric=summary["metric"],
            final=summary["metrics"]["final"],
            learning_rate=summary["learning-rate"],
            rank=summary["rank"],
            parameters=summary["adapter-parameters"],
            bytes_up=summary["bytes-up"],
            bytes_down=summary["bytes-down"],
            seconds=summary["seconds"],
            client_seconds=round(sum(spent), 3) if spent and known else None,
            curve=_curve(summary, rounds, spent if known else [0.0] * len(rounds)),
        )

    def value(self, metric: str = "") -> float:
        """Return a metric after the last round, the task's own if none is named."""
        name = metric or self.metric
        if name not in self.final:
            raise ValueError(
                f"a run has measured {sorted(self.final)}, expected {name!r}; evaluate it"
            )
        return self.final[name]

    @classmethod
    def from_line(cls, line: Mapping[str, Any]) -> "Result":
        """Read it from a line of the record; LookupError or ValueError if that is none."""
        result = cls(**{name: line[name.replace("_", "-")] for name in cls.__dataclass_fields__})
        numbers = [result.learning_rate, result.parameters, result.bytes_up, result.bytes_down]
        numbers += [result.seconds, result.rank or 0, result.client_seconds or 0.0]
        numbers += [*result.final.values(), *chain.from_iterable(result.curve.values())]
        if not all(type(number) in (int, float) for number in numbers):
            raise ValueError("a value in it is no number")
        if result.metric not in result.final or len({*map(len, result.curve.values())}) > 1:
            raise ValueError("its metric is not among its values, or its curve has gaps")
        return result

    def as_line(self) -> dict[str, Any]:
        """Return what the record holds."""
        return {name.replace("_", "-"): value for name, value in vars(self).items()}


def _curve(summary: Summary, rounds: list[RoundRecord], spent: list[float]) -> Curve:
    """Sum bytes and seconds up to each round that was evaluated."""
    curve: dict[str, list[float]] = {}
    sent = seconds = 0.0
    for record, more in zip(rounds, spent, strict=True):
        sent, seconds = sent + record["bytes-up"] + record["bytes-down"], seconds + more
        if summary["metric"] in record["metrics"]:
            point = {"round": record["round"], "bytes": sent, "client-seconds": round(seconds, 3)}
            for name, value in (point | record["metrics"]).items():
                short = float(f"{value:.{_DIGITS}g}") if name in record["metrics"] else value
                curve.setdefault(name, []).append(short)
    return curve


class Results:
    """Find the results of runs: in the record, or in `folder`, from where they come into it."""

    def __init__(self, folder: Path, record: Path | None = None) -> None:
        self.folder, self.record = folder, record or folder / NAME
        self._lines = _read(self.record)
        self._found: dict[str, Result] = {}  # of which the settings are compared already

    def of(self, run: PlannedRun) -> Result | None:
        """Find how the run ended, if it is done with the settings as they resolve today."""
        if run.name not in self._found:
            line = self._lines.get(run.name, {})
            if "failed" not in line and line.get("config") == digest(run):
                self._found[run.name] = Result.from_line(line)
            elif directory := run.directory(self.folder):
                self.note(run, Result.of(RunDirectory(directory)))
        return self._found.get(run.name)

    def note(self, run: PlannedRun, result: Result) -> None:
        """Note what the run has come to."""
        self._append(run, result.as_line())
        self._found[run.name] = result

    def failure(self, run: PlannedRun) -> str | None:
        """Find why the run failed, if it did when it was last tried."""
        line = self._lines.get(run.name, {})
        if "failed" not in line or line["config"] != digest(run):
            return None
        return str(line["failed"])

    def note_failure(self, run: PlannedRun, reason: str) -> None:
        """Note why the run failed."""
        self._append(run, {"failed": reason})

    def _append(self, run: PlannedRun, content: Mapping[str, Any]) -> None:
        """Add a line, on disk when this returns."""
        named = {"run": run.name, "clients": run.num_clients, "settings": run_key_values(run)}
        line = {**named, "config": digest(run), **content}
        self.record.parent.mkdir(parents=True, exist_ok=True)
        with self.record.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, allow_nan=False) + "\n")
            file.flush()
            os.fsync(file.fileno())
        self._lines[run.name] = line


def digest(run: PlannedRun) -> str:
    """Hash the settings as they resolve; a key that has its default counts as one that is new."""
    known = {
        key: _filled(value)
        for key, value in run.resolved.items()
        if key not in KEYS or value != KEYS[key].default
    }
    return hashlib.sha256(json.dumps(known, sort_keys=True).encode()).hexdigest()[:12]


def _filled(value: Any) -> Any:
    """Drop what is empty from a part such as `data`, where later versions add fields."""
    return {k: v for k, v in value.items() if v} if isinstance(value, dict) else value


def _refused(name: str) -> float:
    raise ValueError(f"{name} is no number")


def _read(path: Path) -> dict[str, dict[str, Any]]:
    """Read the lines of a record by run; a last one that was cut off is dropped."""
    if not path.is_file():
        return {}
    *whole, rest = path.read_bytes().split(b"\n")
    if rest:
        log.warning("%s: its last line is cut off; the run is run again", path)
        write_atomically(path, b"".join(line + b"\n" for line in whole))
    found: dict[str, dict[str, Any]] = {}
    for number, text in enumerate(whole, start=1):
        try:
            line = json.loads(text.decode(), parse_constant=_refused)
            if "failed" not in line:
                Result.from_line(line)
            found[line["run"]] = line
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ValueError(
                f"{path}: line {number} is {text[:60]!r} ({error}), expected the result of a run; "
                "restore the file, or take the line out and the run is run again"
            ) from None
    return found
