"""Write and read `status.json`: what a run does at this moment, and who takes part.

The dashboard shows it during the run. It is no record: nothing of the run depends on it,
it may be some moments old, and runs of earlier versions have none.
"""

import json
from contextlib import suppress
from pathlib import Path
from typing import NotRequired

from typing_extensions import TypedDict

from ravan_flwr.files import read_file
from ravan_flwr.runs.directory import check_there, write_atomically
from ravan_flwr.runs.record import check, parsed

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
        "heard": float,  # when it last sent something, in seconds since 1970
    },
)


class RefusedNode(TypedDict):
    """Name a node that cannot take part, and say why."""

    node: str
    reason: str


class RunStatus(TypedDict):
    """Hold what the run does, and who takes part."""

    doing: str  # recruiting, calibrating, training, evaluating, saving, delivering
    since: float  # in seconds since 1970
    round: int  # 0 before the first
    rounds: int  # how many there will be: a run that goes on may get more than at first
    asked: list[int]  # partitions that were sent a message in this step
    answered: list[int]  # those of them that replied
    partitions: int  # in how many the data is shared
    clients: NotRequired[int]  # how many clients are there; earlier versions list them all
    nodes: list[NodeStatus]  # those of this step, and some of the others
    refused: list[RefusedNode]


def write_status(folder: Path, status: RunStatus) -> None:
    """Write the file, whole; a disk that is full costs the page something, and the run nothing."""
    with suppress(OSError, ValueError):
        check_there(folder)
        text = json.dumps(status, allow_nan=False)
        write_atomically(folder / NAME, text.encode(), durable=False)


def drop_status(folder: Path) -> None:
    """Remove the file: the run has ended, and what it does now could not be written."""
    with suppress(OSError):
        (folder / NAME).unlink(missing_ok=True)


def read_status(folder: Path) -> RunStatus | None:
    """Read the file; None if there is none, or it is not as a run writes it."""
    try:
        return check(parsed(read_file(folder / NAME), finite=True), RunStatus)
    except (OSError, ValueError):
        return None
