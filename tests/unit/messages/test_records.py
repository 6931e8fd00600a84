"""Bytes with names in a record: what is read is what was written, or refused."""

import pytest
from flwr.app import Array, ArrayRecord

from ravan_flwr.messages.records import STYPE, read_pieces, to_pieces


def test_pieces_are_read_as_they_were_written():
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
