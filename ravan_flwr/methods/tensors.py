"""Flatten, probe, check, hash and sum up the tensors that travel.

Whatever comes from outside is checked here before it is used: exactly the names, shapes and dtypes
that are expected, and finite numbers.

Weighted float32 tensors are summed in float64: their order hardly leaves a trace.
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
    """Hash the names, dtypes, shapes and bytes of tensors; their order does not matter.

    Of 64 digits nobody finds other tensors with the same.
    """
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        flat = tensor.detach().cpu().contiguous()
        dtype = str(flat.dtype).removeprefix("torch.")
        digest.update(f"{name} {dtype} {tuple(flat.shape)}".encode())
        digest.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:digits]


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


_BLOCK = 2**17


class Sums(Protocol):
    """Sum up one round's uploads on the server; their order does not matter."""

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one checked upload to the sums."""

    def close(self) -> Tensors:
        """Make the next global state, where an upload was added."""


def add_to(total: Tensor, tensor: Tensor, weight: float) -> None:
    """Add weight * tensor, in float32, to a total in float64; both are contiguous.

    PyTorch makes a float64 copy of the tensor first: block by block, that stays in the processor.
    """
    parts = zip(total.view(-1).split(_BLOCK), tensor.view(-1).split(_BLOCK), strict=True)
    for of_total, part in parts:
        of_total.add_(part, alpha=weight)


class Mean:
    """Keep a running weighted mean of tensors of one shape."""

    def __init__(self, old: Tensor) -> None:
        self.old = old
        self.sum = torch.zeros_like(old, dtype=torch.float64)
        self.weight = 0.0

    def add(self, tensor: Tensor, weight: float) -> None:
        """Add one tensor."""
        add_to(self.sum, tensor, weight)
        self.weight += weight

    def close(self) -> Tensor:
        """Compute the mean, or what was there before if nothing came."""
        return (self.sum / self.weight).float() if self.weight else self.old.clone()


class Means:
    """Keep the mean of every tensor of the state."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.means = {name: Mean(tensor) for name, tensor in state.items()}

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload's tensors; one of the state that no upload has stays as it was."""
        for name, mean in self.means.items():
            if name in upload:
                mean.add(upload[name], weight)

    def close(self) -> Tensors:
        """Make the next state."""
        return {name: mean.close() for name, mean in self.means.items()}


FAR = 8.0  # times the median norm, and the next power of two


class MeansBySize:
    """Leave uploads whose norm is far above the median of all out of the means.

    That is known when all have come. Until then there is one sum for each power of two that a
    norm has: honest ones share a few, and one that is far away has its own, which is dropped.
    """

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = dict(state)
        self.classes: dict[int, Means] = {}  # by the norms' exponents
        self.norms: list[float] = []

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add an upload, with the names of the state."""
        norm = math.hypot(*(float(upload[name].double().norm()) for name in self.state))
        self.norms.append(norm)
        means = self.classes.setdefault(math.frexp(norm)[1], Means(self.state))
        means.add(upload, weight)

    def close(self) -> Tensors:
        """Make the next state."""
        total = Means(self.state)
        most = math.frexp(FAR * statistics.median(self.norms))[1] if self.norms else 0
        for exponent in sorted(key for key in self.classes if key <= most):
            for name, mean in self.classes[exponent].means.items():
                total.means[name].sum += mean.sum
                total.means[name].weight += mean.weight
        return total.close()


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans into bytes, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(bits.bool().numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, number: int | None = None) -> Tensor:
    """Unpack that many booleans, or all that the bytes have room for."""
    bits = np.unpackbits(packed.numpy(), count=number, bitorder="little")
    return torch.from_numpy(bits).bool()


class HeadMeans:
    """Keep a sum and a weight for each (layer, head): not every client uploads every head.

    An upload is {"H": (selected, r, r), "heads": packed bits}: one bit for each (layer, head), the
    first in the lowest bit of the first byte, says whether it is among the selected, which follow
    in that order.

    `mean_over_cohort`: a client that did not upload a head counts for it as well, with the old one.
    """

    def __init__(self, H: Tensor, *, mean_over_cohort: bool = False) -> None:
        self.old, self.mean_over_cohort = H, mean_over_cohort
        self.sum = torch.zeros_like(H, dtype=torch.float64).flatten(0, 1)
        self.weight = torch.zeros(len(self.sum), dtype=torch.float64)
        self.total = 0.0

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add products of some heads, where the bits say."""
        chosen = unpack_bits(upload["heads"], len(self.weight))
        where = chosen.nonzero().flatten()
        self.sum.index_add_(0, where, upload["H"].double(), alpha=weight)
        self.weight[chosen] += weight
        self.total += weight

    def close(self) -> Tensors:
        """Make H, with the mean of every head that a client trained."""
        trained = self.weight > 0
        H = self.old.flatten(0, 1).clone()
        mean = self.sum[trained] / self.weight[trained, None, None]
        if self.mean_over_cohort:
            fractions = (self.weight[trained] / self.total)[:, None, None]
            mean = torch.lerp(H[trained].double(), mean, fractions)
        H[trained] = mean.float()
        return {"H": H.view_as(self.old)}
