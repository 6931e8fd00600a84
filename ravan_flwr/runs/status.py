"""Write and read `status.json`: what a run does at this moment, and who takes part.

The dashboard shows it during the run. It is no record: nothing of the run depends on it,
it may be some moments old, and runs of earlier versions have none.
"""

import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import (
    Any,
    NotRequired,
    TypedDict,
    cast,
    get_args,
    get_origin,
    get_type_hints,
    is_typeddict,
)

from ravan_flwr.files import read_file
from ravan_flwr.runs.directory import check_there, write_atomically

NAME = "status.json"
LARGEST = 1e18  # of a number in it

NodeStatus = TypedDict(
    "NodeStatus",
    {
        "partition-id": int,
        "share": float,  # of the largest budget
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
    members: NotRequired[int]  # how many clients are there; earlier versions list them all
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
        content: object = json.loads(read_file(folder / NAME))
    except (OSError, ValueError, RecursionError):
        return None
    return cast(RunStatus, content) if fits(content, RunStatus) else None


def fits(value: object, kind: Any) -> bool:
    """Tell whether a JSON value has a type: a TypedDict, a list of one type, or a plain one."""
    if is_typeddict(kind):
        return isinstance(value, dict) and all(
            fits(value[key], field) if key in value else key in kind.__optional_keys__
            for key, field in _fields(kind).items()
        )
    if get_origin(kind) is list:
        (each,) = get_args(kind)
        return isinstance(value, list) and all(
            fits(one, each) for one in cast(Sequence[Any], value)
        )
    if kind in (int, float):
        return type(value) in ((int,) if kind is int else (int, float)) and _is_sane(value)
    return type(value) is kind


@lru_cache
def _fields(kind: Any) -> Mapping[str, Any]:
    """Return the types of a TypedDict's values, which Python works out anew each time."""
    return get_type_hints(kind)


def _is_sane(value: Any) -> bool:
    return bool(-LARGEST < value < LARGEST) and math.isfinite(value)
