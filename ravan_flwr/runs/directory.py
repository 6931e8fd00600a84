"""Read and write the run directory: settings, the record of each round, the result.

config.json        the resolved configuration
settings.json      the settings that were given last, with which the run is resumed
rounds.jsonl       a line a round, on disk before the next round begins (record.py)
summary.json       the result: method, parameters, metrics, bytes, seconds
classes.json       the last evaluation on the server, class by class (results/classes.py)
checkpoints/       the global state after the last rounds, and the best (checkpoint.py)
adapter/           the trained adapters, or merged/, the whole network (export.py)
report/            a page and pictures (report.py)
tensorboard/       each round's numbers (tracking.py)
failure.json       the error of a failed run
node-keys.json     the node key that each partition is bound to (server/partitions.py)
privacy.json       the privacy budget that has been spent (server/privacy_budget.py)
log.txt            the log, with times (console.py)
lock               the process that writes to it, while there is one (lock.py)
"""

import errno
import json
import os
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, cast

from ravan_flwr.config.keys import KEYS, Config, as_typed
from ravan_flwr.config.presets import read_preset, with_preset_path
from ravan_flwr.files import LARGE, append, named_errors, read_file, write_atomically
from ravan_flwr.runs.record import RoundRecord, Summary, check, check_line, parse_json
from ravan_flwr.specs import Scalar

MAX_CHANGES = 40  # characters of a run's name for what differs from its preset
_NOT_NAMED = (*("preset", "method", "seed"), *("model", "data", "devices", "limits"))  # or paths


def run_name(
    config: Config, run_config: Mapping[str, Scalar], num_clients: int | None = None
) -> str:
    """Return a name for a run: preset, method, seed, and what the user changed, as heads8.

    `num_clients` is the number of simulated clients. Where the changes are too long, the longest
    ones are left out.
    """
    of_preset = read_preset(cast(str, run_config.get("preset", KEYS["preset"].default))).run
    changes = [] if num_clients in (None, config.num_clients) else [f"-clients{num_clients}"]
    for key, spec in KEYS.items():
        value = run_config.get(key, spec.default)
        if not spec.of_result or key in _NOT_NAMED or value in (spec.default, of_preset.get(key)):
            continue
        change = re.sub(r"[^a-z0-9.]+", "-", f"{key}{as_typed(value)}".lower()).strip("-.")
        changes.append(f"-{change}")
    while len("".join(changes)) > MAX_CHANGES:
        changes.remove(max(changes, key=len))
    return f"{config.preset}-{config.method}-seed{config.seed}{''.join(changes)}"


class RunDirectory:
    """One run's folder; files are replaced atomically, and `rounds.jsonl` is appended to."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def create(cls, parent: Path, name: str) -> "RunDirectory":
        """Create a new folder, named after the time and `name`; never use an existing one."""
        stamp = datetime.now().astimezone().strftime("%Y%m%d-%H%M%S")
        for number in range(1000):
            path = parent / (f"{stamp}-{name}" + (f"-{number}" if number else ""))
            try:
                path.mkdir(parents=True)
            except FileExistsError:
                continue
            except OSError as error:
                raise ValueError(
                    f"output-dir = {str(parent)!r}: cannot make a folder there ({error}); "
                    "expected one that can be written to; set output-dir"
                ) from None
            return cls(path)
        raise ValueError(f"output-dir = {str(parent)!r}: 1000 runs began in one second")

    @classmethod
    def open(cls, path: Path, option: str = "resume") -> "RunDirectory":
        """Open the folder of an earlier run; errors name `option`, the user's option or command."""
        if not (path / "config.json").is_file():
            newest = max(path.glob("*/config.json"), key=os.path.getmtime, default=None)
            raise ValueError(
                f"{option} = {str(path)!r}: found no config.json there, expected a run directory "
                "(its absolute path is printed at a run's start and end); correct the path"
                + (f"; the newest run in it is {newest.parent}" if newest else "")
            )
        return cls(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    def write_json(self, name: str, content: Mapping[str, Any]) -> None:
        """Write JSON to the file `name` atomically."""
        self.write(name, json.dumps(content, indent=2, allow_nan=False) + "\n")

    def write(self, name: str, text: str) -> None:
        """Write a text to the file `name` atomically."""
        check_run_exists(self.path)
        write_atomically(self.path / name, text.encode())

    def read_json(self, name: str) -> dict[str, Any]:
        """Read the JSON object in the file `name`."""
        path = self.path / name
        try:
            content = parse_json(read_file(path))
        except FileNotFoundError:
            raise ValueError(
                f"{path} is not there, expected the file of a finished run; let the run end, with "
                "resume=RUN if it was stopped"
            ) from None
        except ValueError as error:
            raise ValueError(f"{path} is damaged ({error}), expected JSON; restore it") from None
        if not isinstance(content, dict):
            raise ValueError(f"{self.path / name}: got no JSON object, expected one; restore it")
        return content

    def read_config(self) -> dict[str, Any]:
        """Read `config.json`."""
        return self.read_json("config.json")

    def write_config(self, config: Config) -> None:
        """Write `config.json`; that of a resumed run keeps its place and number of clients."""
        content = config.as_dict()
        if config.resume:
            earlier = self.read_config()
            content |= {key: earlier.get(key) for key in ("resume", "output-dir", "num-clients")}
        self.write_json("config.json", content)

    def write_settings(self, run_config: Mapping[str, Scalar]) -> None:
        """Write the settings that differ from their defaults, without `resume` and `output-dir`."""
        omit = ("resume", "output-dir")
        settings = {k: v for k, v in run_config.items() if k not in omit and v != KEYS[k].default}
        self.write_json("settings.json", settings)

    def read_settings(self) -> dict[str, Scalar]:
        """Read `settings.json`; `read_config` checks its values, as those of every run config."""
        if not (path := self.path / "settings.json").exists():
            raise ValueError(
                f"{path} is not there, expected the settings with which the run was started; "
                "restore it, or write it: a JSON object of the keys that were set"
            )
        return self.read_json("settings.json")

    def write_num_clients(self, number: int) -> None:
        """Replace the preset's number of clients in `config.json` by that of the run."""
        config = self.read_json("config.json")
        if config.get("num-clients") not in (None, number):  # None: the data determines it
            self.write_json("config.json", config | {"num-clients": number})

    def write_node_keys(self, keys: Mapping[int, str]) -> None:
        """Write the node key that each partition is bound to; a resumed run uses them."""
        if keys and self.read_node_keys() != keys:
            self.write_json("node-keys.json", {str(number): keys[number] for number in keys})

    def read_node_keys(self) -> dict[int, str]:
        """Read the node key that each partition is bound to; empty if no node keeps its key."""
        if not (self.path / "node-keys.json").exists():
            return {}
        content = self.read_json("node-keys.json")
        if not all(n.isdecimal() and isinstance(key, str) for n, key in content.items()):
            raise ValueError(
                f"{self.path / 'node-keys.json'}: expected a key as text for each partition; "
                "restore it, or remove the file"
            )
        return {int(number): key for number, key in content.items()}

    def read_summary(self) -> Summary:
        """Read `summary.json`."""
        content = self.read_json("summary.json")
        try:
            return check(content, Summary)
        except ValueError as error:
            raise ValueError(
                f"{self.path / 'summary.json'} is damaged ({error}), expected that of a finished "
                "run; restore it"
            ) from None

    def append_round(self, record: RoundRecord) -> None:
        """Append a line to `rounds.jsonl`; it is on disk when this returns."""
        path, line = self.path / "rounds.jsonl", json.dumps(record, allow_nan=False)
        check_run_exists(self.path)
        with named_errors(path), path.open("ab") as file:
            append(file, f"{line}\n".encode())

    def read_rounds(self) -> list[RoundRecord]:
        """Read the rounds so far; an incomplete last line is ignored."""
        path, records = self.path / "rounds.jsonl", list[RoundRecord]()
        if not path.exists():
            return records
        for number, line in enumerate(read_file(path, LARGE).split(b"\n")[:-1], start=1):
            try:
                records.append(check_line(line, records[-1] if records else None))
            except ValueError as error:
                raise ValueError(
                    f"{path}: line {number} is damaged ({error}), expected a record of this "
                    "version; restore it"
                ) from None
        return records

    def rounds_until(self, last: int) -> list[RoundRecord]:
        """Read the rounds up to `last`; raise ValueError if that round has no record."""
        records = [record for record in self.read_rounds() if record["round"] <= last]
        if not records or records[-1]["round"] != last:
            number = records[-1]["round"] if records else "none"
            raise ValueError(
                f"{self.path / 'rounds.jsonl'}: the last round in it is {number}, expected {last} "
                "as in the checkpoint; restore the file, or go back with resume=RUN@N"
            )
        return records

    def write_rounds(self, records: Sequence[RoundRecord]) -> None:
        """Replace `rounds.jsonl` by one with only these rounds."""
        lines = (json.dumps(record, allow_nan=False) + "\n" for record in records)
        self.write("rounds.jsonl", "".join(lines))


def check_writable(folder: Path) -> None:
    """Raise ValueError unless run directories can be made in a folder, which may not exist yet."""
    # `Path.exists` raises an error where this process lacks permission.
    existing = next(path for path in (folder, *folder.parents) if os.path.exists(path))  # noqa: PTH110
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(
            f"output-dir = {str(folder)!r}: {existing} is no writable folder, expected "
            "one; set output-dir"
        )


def parse_resume(resume: str) -> tuple[Path, int | None]:
    """Split RUN@N, or RUN alone, into the run directory and the round to go back to."""
    path = Path(resume).expanduser()
    match = re.fullmatch(r"(.+)@(\d+)", str(path))
    return (Path(match[1]), int(match[2])) if match and not path.is_dir() else (path, None)


def with_recorded_settings(
    settings: Mapping[str, Scalar], num_clients: int | None = None
) -> tuple[dict[str, Scalar], int | None]:
    """Complete settings and number of clients from the run to resume; given values win.

    Under Flower the user gives all settings of the run, since clients read them before the server.
    """
    if not settings.get("resume"):
        return dict(settings), num_clients
    directory = RunDirectory.open(parse_resume(str(settings["resume"]))[0])
    records = directory.read_rounds()
    if num_clients is None and records:
        num_clients = records[-1].get("partitions")
    return with_preset_path(directory.read_settings()) | dict(settings), num_clients


def is_write_error(error: OSError, run: Path) -> bool:
    """Return whether an OSError results from writing a run's files."""
    if isinstance(error.filename, str):
        return Path(error.filename).is_relative_to(run)
    return error.errno in _DISK_ERRORS


def check_run_exists(run: Path) -> None:
    """Raise FileNotFoundError if a run directory is gone: a write would create it again."""
    if not run.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(run))


def write_error_message(error: OSError, run: Path) -> str:
    """Return which file could not be written, which round is safe, and how to continue."""
    if not run.is_dir():
        return (
            f"{run} is gone: it was removed or renamed while the run wrote to it, and nothing more "
            "is written; continue from where it is now with resume=RUN, or start a new run"
        )
    rounds = sorted((run / "checkpoints").glob("round-*.safetensors"))
    last = int(rounds[-1].stem.removeprefix("round-")) if rounds else None
    safe = "" if last is None else f"round {last} is safe in the last checkpoint; "
    return (
        f"{error.filename or run} cannot be written: {error.strerror or error}; {safe}"
        f"free some space, or give the right to write there; {resume_advice(run)}"
    )


def resume_advice(run: Path) -> str:
    """Return how to resume a stopped run, or that there is nothing to resume."""
    if any((run / "checkpoints").glob("round-*.safetensors")):
        with_flower = f"with flwr run: resume='{run}' beside the same settings"
        return f"to continue: ravan-flwr simulate resume={run}; {with_flower}"
    return f"no round has finished, so there is nothing to resume: {run}"


# A full disk, a quota, a failing disk, a read-only disk, a file that is too large.
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
