"""The checksum of tensors covers names, dtypes, shapes and bytes."""

import hashlib

import pytest
import torch

from ravan_flwr.methods.tensors import checksum


def test_the_checksum_is_that_of_names_dtypes_shapes_and_bytes():
    written = hashlib.sha256()
    written.update(b"A int32 (1,)" + bytes([7, 0, 0, 0]))
    written.update(b"B float32 (1, 2)" + bytes([0, 0, 128, 63, 0, 0, 0, 192]))  # 1 and -2
    tensors = {"B": torch.tensor([[1.0, -2.0]]), "A": torch.tensor([7], dtype=torch.int32)}
    assert checksum(tensors) == written.hexdigest()[:16]


@pytest.mark.parametrize(
    "other",
    [
        {"y": torch.zeros(2, 3)},
        {"x": torch.zeros(3, 2)},
        {"x": torch.zeros(2, 3, dtype=torch.int32)},
        {"x": torch.zeros(2, 3) + torch.eye(2, 3)},
        {"x": torch.zeros(2, 3), "y": torch.zeros(0)},
    ],
    ids=["name", "shape", "dtype", "numbers", "one more"],
)
def test_any_difference_changes_the_checksum(other):
    assert checksum(other) != checksum({"x": torch.zeros(2, 3)})


def test_the_memory_layout_does_not_change_the_checksum():
    matrix = torch.arange(6.0).view(2, 3)
    assert checksum({"x": matrix.T}) == checksum({"x": matrix.T.contiguous()})
