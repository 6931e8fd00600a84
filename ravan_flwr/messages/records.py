"""Pack named bytes into a record, and read them.

This module imports no torch: a device's process for a message of a secure round loads nothing
heavy.
"""

from collections.abc import Collection, Mapping

from flwr.app import Array, ArrayRecord

from ravan_flwr.messages.plain_text import shown

STYPE = "ravan-flwr.bytes/1"
PIECES = "secure"  # the name of the pieces' record in a message
DISTRUSTS = "distrusts"  # the only piece of a reply that names clients with unverified keys


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
