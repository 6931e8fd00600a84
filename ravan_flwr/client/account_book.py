"""Keep what a device has spent where no other message takes it away: in its state, and in a file.

Flower starts a process for every message, gives each the node's state as it was when it began, and
keeps that of the one that ends last. So a question that begins before a round, and ends after it,
would take the round out of the node's state again, as often as a server asks it. On a device every
entry is a line of a file as well, which only this user can write, and on disk before anything
leaves. The file stays when a SuperNode is started again; its node's state does not.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, BinaryIO

from flwr.app import ConfigRecord, RecordDict

from ravan_flwr.client.on_device import append, is_on_a_device, kept_folder, locked_file
from ravan_flwr.config.node_config import Node

Entry = Mapping[str, Any]


class AccountBook:
    """Hold the entries that there are of one account, as nobody else can change them now."""

    def __init__(self, state: RecordDict, name: str, file: BinaryIO | None) -> None:
        self._state, self._name, self._file = state, name, file

    @property
    def entries(self) -> list[Entry]:
        """Return the last entry of each place: either may have missed some that the other has."""
        kept = self._state.get(self._name)
        entries: list[Entry] = [kept] if isinstance(kept, ConfigRecord) else []
        if self._file is not None:
            self._file.seek(0)
            entries += _last_of(self._file.read().splitlines())
        return entries

    def enter(self, entry: Mapping[str, Any]) -> None:
        """Put an entry into both places; it is on disk when this returns."""
        self._state[self._name] = ConfigRecord(dict(entry))
        if self._file is not None:
            # A line of its own, also after one that was not written whole.
            append(self._file, b"\n" + json.dumps(dict(entry)).encode() + b"\n")


@contextmanager
def opened_book(
    state: RecordDict, name: str, run: str | int, partition: int
) -> Iterator[AccountBook]:
    """Lend the book of an account, of one run on one node, to one process at a time."""
    if not is_on_a_device():
        yield AccountBook(state, name, None)
        return
    place = hashlib.sha256(json.dumps([run, partition, name]).encode()).hexdigest()[:32]
    with locked_file(f"account-{place}") as file:
        yield AccountBook(state, name, file)


def check_kept(node: Node) -> None:
    """Raise ValueError if a device that insists on an epsilon could not keep its account."""
    if node.max_epsilon is not None and is_on_a_device() and kept_folder() is None:
        raise ValueError(
            f"max-epsilon = {node.max_epsilon:g}: this device cannot keep what it spends, expected "
            "a folder ravan-flwr of its user alone in $FLWR_HOME, and no link; make that writable"
        )


def _last_of(lines: list[bytes]) -> list[Entry]:
    """Read the last line that is one; none if there is none."""
    for line in reversed(lines):
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict):
            return [entry]
    return []
