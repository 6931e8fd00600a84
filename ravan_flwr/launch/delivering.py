"""Give the devices that are connected today the result of a run that has ended.

This is a Flower run of its own, of the same app with the run's settings, `resume=RUN`,
`deliver=true` and no round left. So RUN is read twice: here for its settings, which travel to the
devices, and by the process of the ServerApp for the state. Both are on the server's machine.
"""

import os
import shlex
from pathlib import Path
from typing import Any

from ravan_flwr.config.run_config import settings_of
from ravan_flwr.launch.submit import COMPLETED, app_folder, in_toml, search_path, submit
from ravan_flwr.messages.plain_text import listed
from ravan_flwr.runs.console import say
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary

THERE = (
    "RUN is a directory on the server's machine, which the process of the ServerApp wrote: call "
    "this command there, as a user who may read it; or submit the run's settings yourself, with "
    "resume='RUN' deliver=true (docs/deploy.md)"
)


def deliver(run: Path, superlink: str) -> Summary:
    """Deliver a finished run's result by a SuperLink; return the summary of the run after it.

    `superlink` names a connection in Flower's configuration, as for `flwr run`. RuntimeError if
    no device has the result then.
    """
    content, before = _read(run)
    app = app_folder()
    # One round was done at least, so that none is left.
    settings = settings_of(content, f"deliver: {run}") | {
        "num-rounds": 1, "resume": str(run.absolute()), "deliver": True,
    }  # fmt: skip
    words = in_toml(settings)
    say(f"This stands for:\n  flwr run . {superlink} --stream -c {shlex.quote(words)}\n")
    environment = os.environ | {"PATH": search_path(), "PYTHONUNBUFFERED": "1"}
    status = submit(app, superlink, words, environment)
    if status != COMPLETED:
        raise RuntimeError(
            f"the delivery ended as {status!r}, expected {COMPLETED!r}; what it printed stands "
            f"above. {THERE}"
        )
    after = RunDirectory(run).read_summary()
    if after == before and "delivered" not in before:
        raise RuntimeError(f"nothing was noted in {run / 'summary.json'}. {THERE}")
    if not after["delivered"]:
        reasons = listed(f"{one['client']}: {one['reason']}" for one in after["not-delivered"])
        raise RuntimeError(f"no device has the result: {reasons or 'none was connected'}")
    return after


def _read(run: Path) -> tuple[dict[str, Any], Summary]:
    """Read the settings and the summary of a finished run; ValueError if they are not here."""
    try:
        directory = RunDirectory.open(run, "deliver")
        return directory.read_config(), directory.read_summary()
    except PermissionError as error:
        raise ValueError(f"deliver = {str(run)!r}: {error.strerror}. {THERE}") from None
    except ValueError as error:
        raise ValueError(f"{error}. {THERE}" if not run.is_dir() else str(error)) from None
