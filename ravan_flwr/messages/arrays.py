"""Convert tensors to Flower's records and back: few Arrays of raw bytes, checked before use.

An Array of our own `stype` carries the bytes of a tensor and nothing else: no pickle, no
header, any dtype. Its dtype and shape travel beside the bytes, and must agree with their number.
"""

import math
import warnings

import torch
from flwr.app import Array, ArrayRecord, Message
from torch import Tensor

from ravan_flwr.messages.plain_text import shown
from ravan_flwr.methods.base import Tensors

STYPE = "ravan-flwr.raw/1"
MAX_DIMENSIONS = 8  # of a shape: a product over many more does not take linear time
FIXED = "fixed"  # the record of tensors that each client receives once

_DTYPES = {
    name: getattr(torch, name)
    for name in ("float32", "float16", "bfloat16", "uint8", "int8", "int32")
}


def to_record(tensors: Tensors) -> ArrayRecord:
    """Return a record with one little-endian Array for each tensor."""
    return ArrayRecord({name: _to_array(tensor) for name, tensor in tensors.items()})


def from_record(record: ArrayRecord) -> Tensors:
    """Return copies of the tensors of an untrusted record; raise ValueError if it is malformed."""
    return {name: tensor.clone() for name, tensor in view_record(record).items()}


def view_record(record: ArrayRecord) -> Tensors:
    """Return the tensors without a copy of the bytes, for code that never writes to them."""
    return {name: _view_array(name, array) for name, array in record.items()}


def num_bytes(record: ArrayRecord) -> int:
    """Return the bytes of the arrays on the wire, without Flower's envelope."""
    return sum(len(array.data) for array in record.values())


def array_bytes(message: Message) -> int:
    """Return the bytes of a message's arrays, whatever their content."""
    if not message.has_content():
        return 0
    return sum(map(num_bytes, message.content.array_records.values()))


def _to_array(tensor: Tensor) -> Array:
    flat = tensor.detach().cpu().contiguous()
    return Array(
        dtype=str(flat.dtype).removeprefix("torch."),
        shape=tuple(flat.shape),
        stype=STYPE,
        data=flat.reshape(-1).view(torch.uint8).numpy().tobytes(),
    )


def _view_array(name: str, array: Array) -> Tensor:
    label, shape = f"array {shown(name)}", array.shape
    if array.stype != STYPE:
        raise ValueError(f"{label} is of stype {shown(array.stype)}, expected {STYPE!r}")
    if array.dtype not in _DTYPES:
        dtypes = ", ".join(_DTYPES)
        raise ValueError(f"{label} is of dtype {shown(array.dtype)}, expected one of {dtypes}")
    if len(shape) > MAX_DIMENSIONS:  # before anything is computed from it
        raise ValueError(f"{label} has {len(shape)} dimensions, expected {MAX_DIMENSIONS} at most")
    if not all(type(side) is int and 0 <= side < 2**63 for side in shape):
        raise ValueError(f"{label} has shape {shown(shape)}, expected sides from 0")
    dtype = _DTYPES[array.dtype]
    expected = math.prod(shape) * dtype.itemsize
    bound = math.prod(max(side, 1) for side in shape) * dtype.itemsize  # as if no side were 0
    if len(array.data) != expected or bound >= 2**63:
        raise ValueError(
            f"{label} has {len(array.data)} bytes, expected {expected} for {array.dtype} "
            f"{tuple(shape)}"
        )
    if not array.data:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(array.data, dtype=dtype).view(shape)
