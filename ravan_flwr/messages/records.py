"""Send records over a connection to another process, and pack named bytes into a record.

This module imports no torch: a device's process for a message of a secure round loads nothing
heavy.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from ravan_flwr.messages.plain_text import shown

_Record = ArrayRecord | ConfigRecord | MetricRecord
Header = dict[str, Any]

STYPE = "ravan-flwr.bytes/1"
PIECES = "secure"  # the name of the pieces' record in a message
DISTRUSTS = "distrusts"  # the only piece of a reply that names clients with unverified keys


def send_records(connection: Connection, header: Header, records: Sequence[RecordDict]) -> None:
    """Send a JSON header and records."""
    layouts = [[_layout(name, record) for name, record in content.items()] for content in records]
    connection.send_bytes(json.dumps(header | {"records": layouts}).encode())
    for content in records:
        for record in content.array_records.values():
            for array in record.values():
                connection.send_bytes(array.data)


def receive_records(connection: Connection) -> tuple[Header, list[RecordDict]]:
    """Return the header and the records that `send_records` sent."""
    header = json.loads(connection.recv_bytes())
    records = [
        RecordDict(
            {name: _record(record_type, items, connection) for name, record_type, items in layout}
        )
        for layout in header.pop("records")
    ]
    return header, records


def _layout(name: str, record: _Record) -> list[Any]:
    if isinstance(record, ArrayRecord):
        items = [[key, a.dtype, list(a.shape), a.stype] for key, a in record.items()]
        return [name, "arrays", items]
    return [name, "config" if isinstance(record, ConfigRecord) else "metrics", dict(record)]


def _record(record_type: str, items: Any, connection: Connection) -> _Record:
    if record_type == "arrays":
        return ArrayRecord(
            {
                key: Array(dtype, tuple(shape), stype, connection.recv_bytes())
                for key, dtype, shape, stype in items
            }
        )
    return ConfigRecord(items) if record_type == "config" else MetricRecord(items)


def to_pieces(pieces: Mapping[str, bytes]) -> ArrayRecord:
    """Return a record with one Array for each piece."""
    return ArrayRecord(
        {name: Array("uint8", (len(data),), STYPE, data) for name, data in pieces.items()}
    )


def read_pieces(record: ArrayRecord, names: Collection[str]) -> dict[str, bytes]:
    """Return an untrusted record's pieces; raise ValueError unless it has exactly these names."""
    if sorted(record) != sorted(names):
        raise ValueError(f"got pieces {shown(sorted(record))}, expected {sorted(names)}")
    for name, array in record.items():
        if (array.dtype, array.stype) != ("uint8", STYPE):
            raise ValueError(f"{name} is {shown(array.dtype)} {shown(array.stype)}, expected bytes")
    return {name: bytes(array.data) for name, array in record.items()}
