"""Write the rate that a tuning chose into its preset, or say why not, and what to write."""

import importlib.metadata
import stat
from datetime import datetime
from pathlib import Path

from ravan_flwr.config.key_values import as_key_values
from ravan_flwr.config.run_config import read_config
from ravan_flwr.runs.directory import write_atomically
from ravan_flwr.studies.halving import Choice
from ravan_flwr.studies.preset_text import FIELD, as_written, with_rate

# With one of these the rate is that of another model or other data than the preset's.
_OTHER = ("model", "data", "targets", "glue-task")


def adopt(choice: Choice, *, write: bool = True) -> str:
    """Write the rate into the preset's file; return what was done, for people."""
    path = choice.tuning.preset
    try:
        if (why := _why_not(choice, path)) or not write:
            return _by_hand(choice, path, why or "--no-write")
        _write(choice, path)
    except (ValueError, OSError) as error:
        return _by_hand(choice, path, str(error))
    rate = as_written(choice.rate)
    return f"written: {FIELD} of {choice.tuning.config.method} is {rate} in {path}"


def _why_not(choice: Choice, path: Path) -> str:
    """Say why the preset is left alone; empty where it is not."""
    given = [
        word for word in as_key_values(choice.tuning.given) if word.partition("=")[0] in _OTHER
    ]
    if given:
        return f"the rate was chosen with {' '.join(given)}, which the preset does not have"
    if not path.stat().st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
        return "the file is read-only"
    return ""


def _write(choice: Choice, path: Path) -> None:
    """Edit the file; it is as before where the edited one is not read with the rate chosen."""
    place, config = path.resolve(), choice.tuning.config
    before, mode = place.read_bytes(), place.stat().st_mode
    edited = with_rate(before.decode("utf-8"), config.method, choice.rate, notes(choice))
    write_atomically(place, edited.encode())
    place.chmod(stat.S_IMODE(mode))
    try:
        found = read_config(choice.tuning.settings).learning_rate
        if found != choice.rate:
            raise ValueError(f"with it the preset gave {FIELD} = {found!r}")
    except ValueError:
        write_atomically(place, before)
        place.chmod(stat.S_IMODE(mode))
        raise


def notes(choice: Choice) -> list[str]:
    """Write what the rate was chosen from, for the comment above it."""
    tuning, rung, score = choice.tuning, choice.rungs[-1].rung, choice.score
    seeds = " ".join(map(str, rung.seeds))
    clients = f"{tuning.num_clients} client{'s' * (tuning.num_clients != 1)}"
    shown = {k: v for k, v in tuning.given.items() if k not in ("preset", "method", "seed")}
    given = f", with {' '.join(as_key_values(shown))}" if shown else ""
    version = importlib.metadata.version("ravan-flwr")
    today = datetime.now().astimezone().date().isoformat()
    told = [
        f"{score.metric} {score} on examples that {clients} held back, seeds "
        f"{seeds}, {rung.length}{given}",
        f"tried {' '.join(f'{rate:g}' for rate in sorted(choice.tried))}; ravan-flwr {version}, "
        f"{today}",
    ]
    return [" ".join(line.split()) for line in told]


def _by_hand(choice: Choice, path: Path, why: str) -> str:
    """Say that nothing was written, and what a person may write or give."""
    method, rate = choice.tuning.config.method, as_written(choice.rate)
    return "\n".join(
        [
            f"not written to {path}: {why}. Give {FIELD}={choice.rate:g}, or write in a preset of "
            "your own:",
            f"{FIELD}:",
            *(f"  # tune of {method}: {note}" for note in notes(choice)),
            f"  {method}: {rate}",
        ]
    )
