"""Read a run directory again and again, and only what is new in it."""

import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.files import LARGE, opened
from ravan_flwr.runs import log_file, status
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.lock import NAME as LOCK
from ravan_flwr.runs.lock import Holder, holder_of
from ravan_flwr.runs.record import (
    NEEDED_BY_A_REPORT,
    RoundRecord,
    check_line,
    needed_in,
    wrong_in,
)
from ravan_flwr.runs.status import RunStatus, read_status

_WATCHED = (
    "config.json", "rounds.jsonl", "summary.json", "failure.json",
    status.NAME, log_file.NAME, LOCK,
)  # fmt: skip
_SIGNS_OF_LIFE = ("config.json", "rounds.jsonl", status.NAME, log_file.NAME, LOCK)


@dataclass(frozen=True)
class RunSnapshot:
    """Hold what a run directory had at one moment."""

    path: Path
    config: dict[str, Any]  # empty before the run has written it
    rounds: list[RoundRecord]
    summary: dict[str, Any] | None
    failure: str | None
    status: RunStatus | None  # None in runs of earlier versions
    log: list[str]
    holder: Holder  # who works on it
    heard: float  # when something was written last, in seconds since 1970


class FollowedRun:
    """Follow one run: `version` says whether something changed, `read` reads what is new."""

    def __init__(self, path: Path) -> None:
        if not (path / LOCK).is_file():  # of a run that begins, which writes its settings next
            RunDirectory.open(path, "watch")
        self.path = path
        self._rounds = _Rounds(path / "rounds.jsonl")

    def version(self) -> str:
        """Describe the state of the files: another text if one of them has changed."""
        stats = [_stat(self.path / name) for name in _WATCHED]
        told = [f"{s.st_ino}.{s.st_size}.{s.st_mtime_ns}" if s else "" for s in stats]
        return "-".join([*told, holder_of(self.path)])

    def read(self) -> RunSnapshot:
        """Read the run as it is now; ValueError if a file is damaged."""
        directory = RunDirectory(self.path)
        if not self.path.is_dir():
            raise ValueError(f"{self.path} is gone, expected the run directory that was there")
        there = {name for name in _WATCHED if (self.path / name).is_file()}
        config = directory.read_config() if "config.json" in there else {}
        failure = directory.read_json("failure.json") if "failure.json" in there else None
        stats = filter(None, (_stat(self.path / name) for name in _SIGNS_OF_LIFE))
        return RunSnapshot(
            path=self.path,
            config=config,
            rounds=self._rounds.read(),
            summary=directory.read_json("summary.json") if "summary.json" in there else None,
            failure=None if failure is None else str(failure.get("error", "no reason given")),
            status=read_status(self.path),
            log=log_file.last_lines(self.path),
            holder=holder_of(self.path),
            heard=max((s.st_mtime for s in stats), default=time.time()),
        )


class _Rounds:
    """Read the lines of `rounds.jsonl` that have come since the last time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._forget()

    def _forget(self) -> None:
        self._inode, self._read = 0, 0
        self._records: list[RoundRecord] = []

    def read(self) -> list[RoundRecord]:
        """Return all rounds so far; a last line that is still being written does not count."""
        found = _stat(self._path)
        if found is None:
            self._forget()
            return []
        if found.st_ino != self._inode or found.st_size < self._read:
            self._forget()  # a run that went back has written the file anew
            self._inode = found.st_ino
        with opened(self._path, LARGE) as file:
            file.seek(self._read)
            for line in file.read().split(b"\n")[:-1]:
                self._records.append(self._checked(line))
                self._read += len(line) + 1
        return list(self._records)

    def _checked(self, line: bytes) -> RoundRecord:
        number = len(self._records) + 1
        before = self._records[-1]["round"] if self._records else None
        try:
            record = check_line(line, before)
            if lacking := sorted(set(needed_in(record, NEEDED_BY_A_REPORT)) - record.keys()):
                raise ValueError(f"it lacks {', '.join(lacking)}")
            if problem := wrong_in(record, NEEDED_BY_A_REPORT):
                raise ValueError(f"it has {problem}")
        except ValueError as error:
            raise ValueError(
                f"{self._path}: line {number} cannot be used ({error}), expected a round's record "
                "of this version; restore it"
            ) from None
        return record


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
