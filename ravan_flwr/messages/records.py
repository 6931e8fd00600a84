"""Carry bytes with names in a record.

No torch here: a device's process for a message of a secure round loads nothing heavy.
"""

from collections.abc import Collection, Mapping

from flwr.app import Array, ArrayRecord

from ravan_flwr.messages.plain_text import shown

STYPE = "ravan-flwr.bytes/1"
PIECES = "secure"  # the record of a message
DISTRUSTS = "distrusts"  # the one piece of a reply that names clients whose keys are not theirs


def to_pieces(parts: Mapping[str, bytes]) -> ArrayRecord:
    """Make one Array of each."""
    return ArrayRecord(
        {name: Array("uint8", (len(data),), STYPE, data) for name, data in parts.items()}
    )


def read_pieces(record: ArrayRecord, names: Collection[str]) -> dict[str, bytes]:
    """Read a record of unknown origin, which must have exactly these; ValueError if not."""
    if sorted(record) != sorted(names):
        raise ValueError(f"got pieces {shown(sorted(record))}, expected {sorted(names)}")
    for name, array in record.items():
        if (array.dtype, array.stype) != ("uint8", STYPE):
            raise ValueError(f"{name} is {shown(array.dtype)} {shown(array.stype)}, expected bytes")
    return {name: bytes(array.data) for name, array in record.items()}
