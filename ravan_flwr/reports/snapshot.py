"""Read a run as it is at one moment, and say what it does then.

`FollowedRun` reads a run directory again and again, and only what is new in it.
"""

import os
import time
from dataclasses import dataclass
from pathlib import Path

from ravan_flwr.files import LARGE, opened
from ravan_flwr.runs import log_file, status
from ravan_flwr.runs.console import remaining
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.history import RecordedRun
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

_SIGNS_OF_LIFE = ("config.json", "rounds.jsonl", status.NAME, log_file.NAME, LOCK)
_WATCHED = (*_SIGNS_OF_LIFE, "summary.json", "failure.json", "classes.json", "samples.jsonl")


@dataclass(frozen=True)
class RunSnapshot:
    """Hold what a run directory had at one moment."""

    run: RecordedRun  # its config is empty before the run has written it
    failure: str | None
    status: RunStatus | None  # None in runs of earlier versions
    log: list[str]
    holder: Holder  # who works on it
    heard: float  # when something was written last, in seconds since 1970

    @classmethod
    def of(cls, run: RecordedRun) -> "RunSnapshot":
        """Read what lies beside a run's records."""
        there = (run.path / "failure.json").is_file()
        failure = RunDirectory(run.path).read_json("failure.json") if there else None
        stats = filter(None, (_stat(run.path / name) for name in _SIGNS_OF_LIFE))
        return cls(
            run=run,
            failure=None if failure is None else str(failure.get("error", "no reason given")),
            status=read_status(run.path),
            log=log_file.last_lines(run.path),
            holder=holder_of(run.path),
            heard=max((s.st_mtime for s in stats), default=time.time()),
        )

    @property
    def rounds(self) -> int:
        """Return how many rounds there will be; 0 if that is not known yet."""
        if self.status and self.status["rounds"]:
            return self.status["rounds"]
        planned = self.run.config.get("num-rounds")
        return planned if type(planned) is int else 0

    @property
    def last_round(self) -> int:
        return self.run.rounds[-1]["round"] if self.run.rounds else 0

    @property
    def under_way(self) -> bool:
        """Return whether a process works on the run, as far as one can tell."""
        if self.holder == "unknown":
            return self.run.summary is None and self.failure is None
        return self.holder == "a process"

    def seconds_left(self) -> float | None:
        """Estimate the time to the last round; None if the run has ended."""
        if not self.under_way or not self.run.rounds or not self.rounds:
            return None
        seconds = [record["seconds"] for record in self.run.rounds]
        return remaining(seconds, self.rounds - self.last_round)


@dataclass(frozen=True)
class State:
    """Hold what a run does, in a word and a sentence, which may end in since when."""

    word: str  # running, finished, failed, stopped
    text: str
    since: float | None = None  # in seconds since 1970
    advice: str = ""
    done: float = 0.0  # the share of the rounds


def state_of(seen: RunSnapshot) -> State:
    """Say what the run does: it is under way, has ended, has failed, or has gone silent."""
    last = seen.last_round
    done = min(1.0, last / seen.rounds) if seen.rounds else 0.0
    if seen.under_way:
        return _under_way(seen, done)
    after = f"after {last} round{'' if last == 1 else 's'}"
    advice = f"To go on: resume={seen.run.path} (flwr run needs the same settings beside it)"
    if seen.failure is not None:
        return State("failed", f"It failed {after}: {seen.failure}", None, advice, done)
    if seen.run.summary is not None:
        return State("finished", f"It ended {after}.", None, "", 1.0)
    if not last:
        advice = "No round has finished, so that there is nothing to go on from; start a new run."
    how = "Its process is gone" if seen.holder == "a dead process" else "It was stopped"
    text = f"{how} {after}, without a result. Nothing has been heard of it for"
    return State("stopped", text, seen.heard, advice, done)


def _under_way(seen: RunSnapshot, done: float) -> State:
    """Say which step of which round it is in, and for how long."""
    status, advice = seen.status, ""
    if not any(record["round"] for record in seen.run.rounds):
        advice = "No round has finished yet; the pictures come with the first."
    if seen.holder == "unknown":
        advice = f"Its process is not of this machine: whether it lives cannot be seen. {advice}"
    if status is None:
        text = "It goes on" if seen.run.rounds else "It is being prepared"
        return State("running", f"{text}. Nothing was written for", seen.heard, advice, done)
    asked = len(status["asked"])
    answers = f", {len(status['answered'])} of {asked} clients have answered" if asked else ""
    here = status.get("members", len(status["nodes"]))
    text = {
        "recruiting": f"Waiting for clients, {here} {'is' if here == 1 else 'are'} here",
        "calibrating": f"Calibrating before the first round{answers}",
    }.get(status["doing"], f"Round {status['round']} of {seen.rounds}: {status['doing']}{answers}")
    return State("running", f"{text}, for", status["since"], advice, done)


class FollowedRun:
    """Follow one run: `version` says whether something changed, `read` reads what is new."""

    def __init__(self, path: Path) -> None:
        if not (path / LOCK).is_file():  # of a run that begins, which writes its settings next
            RunDirectory.open(path, "report")
        self.path = path
        self._inode, self._bytes = 0, 0  # of the lines of rounds.jsonl that were read
        self._records: list[RoundRecord] = []

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
        config = directory.read_config() if (self.path / "config.json").is_file() else {}
        rounds = self._read_rounds()
        if rounds:
            config["num-clients"] = max(record["partitions"] for record in rounds)
        done = (self.path / "summary.json").is_file()
        summary = directory.read_summary() if done else None
        return RunSnapshot.of(RecordedRun(self.path, config, rounds, summary))

    def _read_rounds(self) -> list[RoundRecord]:
        """Return all rounds so far; a last line that is still being written does not count."""
        path = self.path / "rounds.jsonl"
        found = _stat(path)
        inode, size = (found.st_ino, found.st_size) if found else (0, 0)
        if inode != self._inode or size < self._bytes:  # a run that went back writes it anew
            self._inode, self._bytes, self._records = inode, 0, []
        if not found:
            return []
        with opened(path, LARGE) as file:
            file.seek(self._bytes)
            for line in file.read().split(b"\n")[:-1]:
                self._records.append(self._checked(line))
                self._bytes += len(line) + 1
        return list(self._records)

    def _checked(self, line: bytes) -> RoundRecord:
        before = self._records[-1]["round"] if self._records else None
        try:
            record = check_line(line, before)
            if lacking := sorted(set(needed_in(record, NEEDED_BY_A_REPORT)) - record.keys()):
                raise ValueError(f"it lacks {', '.join(lacking)}")
            if problem := wrong_in(record, NEEDED_BY_A_REPORT):
                raise ValueError(f"it has {problem}")
        except ValueError as error:
            raise ValueError(
                f"{self.path / 'rounds.jsonl'}: line {len(self._records) + 1} cannot be used "
                f"({error}), expected a round's record of this version; restore it"
            ) from None
        return record


def _stat(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None
