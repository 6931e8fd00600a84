"""Flatten, fingerprint, check, hash and sum the tensors that travel.

Received tensors are checked here before use: they must have exactly the expected names, shapes and
dtypes, and finite numbers.

Weighted float32 tensors are summed in float64, so that their order hardly affects the sum.
"""

import hashlib
import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import numpy as np
import torch
from torch import Tensor

Tensors = dict[str, Tensor]


def checksum(tensors: Mapping[str, Tensor], digits: int = 16) -> str:
    """Return a SHA-256 hash of the names, dtypes, shapes and bytes of tensors, in any order.

    All 64 hexadecimal digits make it collision-resistant.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous()
        dtype = str(flat.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {tuple(flat.shape)}".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:digits]


def flatten(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors into one flat tensor, in float32 on the CPU."""
    return torch.cat([tensor.detach().float().cpu().flatten() for tensor in tensors])


def probe(layers: Sequence[Sequence[Tensor]]) -> list[float]:
    """Return a fingerprint of the layers' bases: weighted sums over all entries of all layers."""
    sums = []
    for position, bases in enumerate(layers, start=1):
        numbers = []
        for basis in bases:  # two sums each, whose weights depend on the entry's position
            flat = basis.detach().cpu().double().flatten()
            angles = torch.arange(len(flat), dtype=torch.float64)
            numbers += [flat @ torch.cos(angles), flat @ torch.sin(angles * 0.7)]
        sums.append(torch.stack(numbers) * position)
    return cast(list[float], torch.stack(sums).sum(0).tolist())


def check_tensor(
    upload: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the upload's tensor of that name; ValueError on a wrong shape, dtype or value."""
    tensor = check_form(upload, name, shape, dtype)
    if not tensor.is_meta:  # the command `plan` has shapes only
        sum_of_squares(tensor, name)
    return tensor


def check_form(
    upload: Mapping[str, Tensor], name: str, shape: Sequence[int], dtype: torch.dtype
) -> Tensor:
    """Return the upload's tensor of that name; ValueError on a wrong shape or dtype."""
    if name not in upload:
        raise ValueError(f"got tensors {sorted(upload)}, expected {name!r} among them")
    tensor = upload[name]
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        raise ValueError(
            f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}"
        )
    return tensor


def sum_of_squares(tensor: Tensor, name: str) -> float:
    """Return the sum of squares, zero for integers; ValueError if a number is not finite.

    The sum is in float32 unless that overflows: one pass over the tensor, without a copy.
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


_BLOCK = 2**17


class Sums(Protocol):
    """Sum one round's uploads on the server, in any order."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one checked upload to the sums."""

    def close(self) -> Tensors:
        """Return the next global state, after at least one upload."""


def add_to(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight * tensor (float32) to a total (float64), both contiguous.

    PyTorch first copies the tensor to float64. A block's copy stays in the processor's cache.
    """
    parts = zip(total.view(-1).split(_BLOCK), tensor.view(-1).split(_BLOCK), strict=True)
    for of_total, part in parts:
        of_total.add_(part, alpha=weight)


class Mean:
    """A running weighted mean of tensors of one shape."""

    def __init__(self, old: Tensor) -> None:
        self.old = old
        self.sum = torch.zeros_like(old, dtype=torch.float64)
        self.weight = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add one tensor."""
        add_to(self.sum, tensor, weight)
        self.weight += weight

    def close(self) -> Tensor:
        """Return the mean, or the old tensor if none was added."""
        return (self.sum / self.weight).float() if self.weight else self.old.clone()


class Means:
    """The running mean of every tensor of the state."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.means = {name: Mean(tensor) for name, tensor in state.items()}

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload's tensors; a tensor of the state that no upload has does not change."""
        for name, mean in self.means.items():
            if name in upload:
                mean.add(upload[name], weight)

    def close(self) -> Tensors:
        """Return the next state."""
        return {name: mean.close() for name, mean in self.means.items()}


MAX_NORM_RATIO = 8.0  # to the median norm, rounded up to the next power of two


class MeansByNorm:
    """Running means without the uploads whose norm is far above the median norm.

    The median is known only after the last upload. Until then, uploads are summed by the power of
    two of their norm. Honest uploads share a few sums; the sums of far larger norms are dropped.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)
        self.classes: dict[float, Means] = {}  # by the exponent of the norm
        self.norms: list[float] = []

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload that has all names of the state."""
        norm = math.hypot(*(float(upload[name].double().norm()) for name in self.state))
        self.norms.append(norm)
        exponent = math.frexp(norm)[1] if norm else -math.inf  # zero is below all others
        means = self.classes.setdefault(exponent, Means(self.state))
        means.add(upload, weight)

    def close(self) -> Tensors:
        """Return the next state."""
        total = Means(self.state)
        max_exponent = (
            math.frexp(MAX_NORM_RATIO * statistics.median(self.norms))[1] if self.norms else 0
        )
        for exponent in sorted(key for key in self.classes if key <= max_exponent):
            for name, mean in self.classes[exponent].means.items():
                total.means[name].sum += mean.sum
                total.means[name].weight += mean.weight
        return total.close()


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans into bytes, the first into the lowest bit."""
    return torch.from_numpy(np.packbits(bits.bool().numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, number: int | None = None) -> Tensor:
    """Unpack `number` booleans, or all bits of the bytes."""
    bits = np.unpackbits(packed.numpy(), count=number, bitorder="little")
    return torch.from_numpy(bits).bool()
