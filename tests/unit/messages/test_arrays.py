"""Arrays in records of unknown origin."""

import pytest
import torch
from flwr.app import Array, ArrayRecord
from hypothesis import given
from hypothesis import strategies as st

from ravan_flwr.messages.arrays import STYPE, from_record, num_bytes, to_record, view_record

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.uint8, torch.int32]


@given(st.sampled_from(DTYPES), st.lists(st.integers(0, 4), max_size=3))
def test_tensors_round_trip(dtype, shape):
    tensor = (torch.rand(shape) * 100).to(dtype)
    record = to_record({"x": tensor})
    arrived = from_record(record)["x"]
    assert arrived.dtype == dtype
    assert torch.equal(arrived, tensor)
    assert num_bytes(record) == tensor.numel() * tensor.element_size()


def test_a_decoded_tensor_is_writable_and_leaves_the_record_unchanged():
    record = to_record({"x": torch.ones(3)})
    from_record(record)["x"].zero_()
    assert torch.equal(from_record(record)["x"], torch.ones(3))


def test_a_view_shares_the_records_bytes():
    record = to_record({"x": torch.arange(3.0)})
    one, other = (view_record(record)["x"] for _ in range(2))
    assert one.tolist() == [0.0, 1.0, 2.0]
    assert one.data_ptr() == other.data_ptr()


def test_transposed_tensors_round_trip():
    tensor = torch.arange(6.0).view(2, 3).T
    assert torch.equal(from_record(to_record({"x": tensor}))["x"], tensor)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (Array("float32", (2,), "numpy.ndarray", b"\0" * 8), "is of stype 'numpy.ndarray'"),
        (Array("object", (2,), STYPE, b"\0" * 8), "is of dtype 'object', expected one of float32"),
        (Array("float32", (3,), STYPE, b"\0" * 8), "has 8 bytes, expected 12"),
        (Array("float32", (-1, -2), STYPE, b"\0" * 8), "expected sides from 0"),
        (Array("float32", (2**40, 2**40), STYPE, b""), "has 0 bytes, expected"),
        (Array("float32", (2**31 - 1,) * 3 + (0,), STYPE, b""), "has 0 bytes, expected 0 for"),
    ],
)
def test_an_invalid_array_is_refused(array, message):
    with pytest.raises(ValueError, match=message):
        from_record(ArrayRecord({"x": array}))
