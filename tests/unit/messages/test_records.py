"""Named byte strings in a record round-trip; other records are refused."""

import pytest
from flwr.app import Array, ArrayRecord

from ravan_flwr.messages.records import STYPE, read_pieces, to_pieces


def test_named_bytes_round_trip():
    parts = {"one": b"abc", "two": b"", "three": bytes(range(256))}
    assert read_pieces(to_pieces(parts), ("three", "one", "two")) == parts


@pytest.mark.parametrize(
    "record",
    [
        ArrayRecord({}),
        to_pieces({"one": b"", "more": b""}),
        ArrayRecord({"one": Array("uint8", (3,), "numpy.ndarray", b"abc")}),
        ArrayRecord({"one": Array("float32", (1,), STYPE, b"abcd")}),
    ],
)
def test_other_records_are_refused(record):
    with pytest.raises(ValueError, match="expected"):
        read_pieces(record, ("one",))
