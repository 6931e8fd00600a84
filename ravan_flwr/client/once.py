"""Let a device answer what may be asked once only once, however many processes are asked at a time.

Flower starts a process for every message, at once. Each has the node's state as it was when it
began, and the state of the one that ends last is kept. So a server that asks twice at the same time
would get signatures of two lists, or two private rounds that the account has as one. What stands
against it is a number that only goes up, in a file that only this user can write.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.supercore.task_identity import TaskIdentity

from ravan_flwr.secure.phases import PHASES

_ACCOUNT = "privacy-account"  # as example_account.py names it, which needs torch
_NONE = 1  # task ids up to this are of no process that a SuperNode started


def only_once(kind: str, content: RecordDict, context: Context, partition: int) -> None:
    """Raise ValueError if a process of this node was asked this, or something later, before."""
    step = _step_of(kind, content, context)
    if step is None or not is_on_a_device():
        return
    name, number = step
    _step_up(f"{context.run_id}-{partition}-{name}", number)


def _step_of(kind: str, content: RecordDict, context: Context) -> tuple[str, int] | None:
    """Number what is asked; None if it may be asked again."""
    if kind in PHASES:
        return "secure", len(PHASES) * _whole(content, "round") + PHASES.index(kind)
    if kind == "train" and context.run_config.get("privacy") == "example":
        earlier = _whole(content, "earlier-rounds")
        return "private", max(_whole(context.state, "rounds", _ACCOUNT), earlier) + 1
    return None


def _step_up(name: str, number: int) -> None:
    """Note a number that is larger than all before it."""
    with locked_file(name) as file:
        file.seek(0)
        lines = file.read().splitlines()
        last = int(lines[-1]) if lines else -1
        if number <= last:
            raise ValueError(
                "asked at the same time for what this node does once, or again for what it has "
                "done, expected one message after the other"
            )
        file.write(b"%d\n" % number)
        file.flush()
        os.fsync(file.fileno())


@contextmanager
def locked_file(name: str) -> Iterator[BinaryIO]:
    """Lend a file of this user's to one process at a time; what is written comes at its end."""
    import fcntl  # noqa: PLC0415 (POSIX alone has it, and devices alone need it)

    folder = _folder()
    folder.mkdir(mode=0o700, exist_ok=True)
    descriptor = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "a+b") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # until it is closed
        yield file


def _folder() -> Path:
    """Find a folder of this user alone."""
    from ravan_flwr.client.worker import private_folder  # noqa: PLC0415 (POSIX alone has it)

    return private_folder() / "once"


def _whole(records: RecordDict, name: str, record: str = "config") -> int:
    """Read a number of a record; 0 of one that whoever answers will refuse."""
    found: Mapping[str, object] = records.config_records.get(record, ConfigRecord())
    value = found.get(name)
    return value if type(value) is int and 0 <= value < 2**53 else 0


def is_on_a_device() -> bool:
    """Tell whether a SuperNode has started this process: in others messages take turns."""
    return task_of_process() > _NONE


def task_of_process() -> int:
    """Return the number that Flower has given to what this process does; 0 if none."""
    try:
        return TaskIdentity.task_id
    except RuntimeError:  # Flower has said nothing
        return 0


def work_for_task(number: int) -> None:
    """Let a warm worker answer for the process of a message, with that one's number."""
    TaskIdentity.task_id = number
