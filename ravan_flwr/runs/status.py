"""Write and read `status.json`: the present step of a run, and its clients.

The dashboard shows it during the run. It is no record: nothing of the run depends on it,
it may be some moments old, and runs of earlier versions have none.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from ravan_flwr.files import read_file, write_atomically
from ravan_flwr.runs.directory import check_run_exists
from ravan_flwr.runs.record import check, parse_json

NAME = "status.json"

NodeStatus = TypedDict(
    "NodeStatus",
    {
        "partition-id": int,
        "budget-fraction": float,  # of the adapter
        "device": str,
        "examples": int,
        "own-data": bool,
        "versions": str,
        "heard": float,  # time of its last message, in seconds since 1970
    },
)


class RefusedNode(TypedDict):
    """A node that cannot take part, and the reason."""

    node: str
    reason: str


class RunStatus(TypedDict):
    """The present step of a run, and its clients."""

    doing: str  # recruiting, calibrating, training, evaluating, saving, delivering
    since: float  # beginning of the step, in seconds since 1970
    round: int  # 0 before the first
    rounds: int  # how many there will be; a resumed run may have more than at first
    asked: list[int]  # partitions that were sent a message in this step
    answered: list[int]  # partitions of `asked` that replied
    partitions: int  # number of partitions of the data
    clients: NotRequired[int]  # number of registered clients; absent in earlier versions
    nodes: list[NodeStatus]  # nodes of this step, and some of the others
    refused: list[RefusedNode]


def write_status(folder: Path, status: RunStatus) -> None:
    """Write the file atomically; errors are ignored, so that a full disk does not stop the run."""
    with suppress(OSError, ValueError):
        check_run_exists(folder)
        text = json.dumps(status, allow_nan=False)
        write_atomically(folder / NAME, text.encode(), durable=False)


def drop_status(folder: Path) -> None:
    """Remove the file, when the run ends and its last status could not be written."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


def read_status(folder: Path) -> RunStatus | None:
    """Read the file; None if it is missing or invalid."""
    try:
        return check(parse_json(read_file(folder / NAME), finite=True), RunStatus)
    except (OSError, ValueError):
        return None
