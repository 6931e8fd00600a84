"""Flatten, probe, check and hash the tensors that travel.

Whatever comes from outside is checked here before it is used: exactly the names, shapes and dtypes
that are expected, and finite numbers.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hash the names, dtypes, shapes and bytes of tensors; their order does not matter."""
    return whole_checksum(tensors)[:16]


def whole_checksum(tensors: Mapping[str, Tensor]) -> str:
    """Hash tensors to so many digits that nobody finds others with the same."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous()
        dtype = str(flat.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {tuple(flat.shape)}".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Join tensors one after the other, in float32 on the CPU."""
    return torch.cat([tensor.detach().float().cpu().flatten() for tensor in tensors])


def probe(layers: Sequence[Sequence[Tensor]]) -> list[float]:
    """Sum the bases of each layer up to numbers to which every entry of every layer counts."""
    sums = []
    for position, bases in enumerate(layers, start=1):
        numbers = []
        for basis in bases:  # two sums each, with weights that no shift keeps
            flat = basis.detach().cpu().double().flatten()
            angles = torch.arange(len(flat), dtype=torch.float64)
            numbers += [flat @ torch.cos(angles), flat @ torch.sin(angles * 0.7)]
        sums.append(torch.stack(numbers) * position)
    return cast(list[float], torch.stack(sums).sum(0).tolist())


def check_tensor(
    upload: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Take the upload's tensor of that name, of exactly that shape and dtype, and finite."""
    tensor = check_form(upload, name, shape, dtype)
    if not tensor.is_meta:  # a plan has shapes only
        sum_of_squares(tensor, name)
    return tensor


def check_form(
    upload: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Take the upload's tensor of that name, of exactly that shape and dtype."""
    if name not in upload:
        raise ValueError(f"got tensors {sorted(upload)}, expected {name!r} among them")
    tensor = upload[name]
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}"
        )
    return tensor


def sum_of_squares(tensor: Tensor, name: str) -> float:
    """Sum up the squares, zero for integers; ValueError if a number is not finite.

    In float32, unless that overflows: one reading of the tensor, and no copy of it.
    """
    if not tensor.is_floating_point():
        return 0.0
    flat = tensor.detach().reshape(-1)
    total = float(flat @ flat)
    if not math.isfinite(total):
        total = float(flat.double().square().sum())
    if not math.isfinite(total):
        raise ValueError(f"{name} has values that are not finite, expected finite ones")
    return total


def check_names(upload: Mapping[str, Tensor], expected: Sequence[str]) -> None:
    """Raise ValueError unless the upload has exactly these tensors."""
    if sorted(upload) != sorted(expected):
        raise ValueError(f"got tensors {sorted(upload)}, expected {sorted(expected)}")
