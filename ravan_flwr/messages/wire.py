"""Encode numbers for the wire: unchanged, in 16 bits, or in 8 bits with a scale for each head.

Only the float32 tensors of uploads and broadcasts are encoded, not the server's state and sums or
the clients' training. `int8` divides a head by its largest absolute value and rounds to one of 255
steps, up or down at random, so that the mean over many clients is unbiased. Tensors without heads
(a LoRA's factors, a classifier) have a scale for every 1024 numbers.
"""

import math
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors

_HALVES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
_CODED = {**_HALVES, "int8": torch.int8}
_BLOCK = 1024
_SCALES = "/scales"
_STEPS = 127


def wire_of_round(wire: str, number: int) -> str:
    """Return the wire format of a round: float32 for a calibration, which is round 0."""
    return wire if number else "float32"


def encode(tensors: Mapping[str, Tensor], wire: str, random: torch.Generator) -> Tensors:
    """Return encoded tensors, rounded by `random`; raise ValueError if a number overflows."""
    coded: Tensors = {}
    for name, tensor in sorted(tensors.items()):  # a loaded checkpoint has another order
        if wire == "float32" or tensor.dtype != torch.float32:
            coded[name] = tensor
        elif wire == "int8":
            coded[name], coded[name + _SCALES] = _to_steps(tensor, random)
        else:
            coded[name] = _to_half(name, tensor, wire)
    return coded


def check_overflow(tensors: Mapping[str, Tensor], wire: str) -> None:
    """Raise ValueError if a number overflows the wire format."""
    for name, tensor in tensors.items():
        if wire in _HALVES and tensor.dtype == torch.float32:
            _to_half(name, tensor, wire)


def _to_half(name: str, tensor: Tensor, wire: str) -> Tensor:
    half = tensor.to(_HALVES[wire])
    if (half.isinf() & tensor.isfinite()).any():
        raise ValueError(
            f"wire = {wire!r}: {name} has numbers up to {float(tensor.abs().max()):.3g}, "
            f"expected at most {torch.finfo(_HALVES[wire]).max:.6g}; use wire=bfloat16, or "
            "lower learning-rate"
        )
    return half


def decode(tensors: Mapping[str, Tensor], wire: str, max_numbers: int | None = None) -> Tensors:
    """Return tensors decoded into float32; raise ValueError for input that `encode` never makes.

    The result takes four bytes a number, at most four times the bytes sent. With `max_numbers`,
    raise ValueError for more numbers before any tensor is decoded.
    """
    if wire == "float32":
        return dict(tensors)
    expected = _CODED[wire]
    numbers = sum(tensor.numel() for tensor in tensors.values() if tensor.dtype == expected)
    if max_numbers is not None and numbers > max_numbers:
        raise ValueError(f"its tensors have {numbers} numbers, expected {max_numbers} at most")
    plain: Tensors = {}
    for name, tensor in tensors.items():
        if name.endswith(_SCALES):
            if name.removesuffix(_SCALES) not in tensors:
                raise ValueError(f"{name} has no tensor that it scales")
        elif tensor.dtype == expected:
            scales = tensors.get(name + _SCALES)
            plain[name] = tensor.float() if wire != "int8" else _from_steps(name, tensor, scales)
        elif tensor.dtype.is_floating_point:
            raise ValueError(f"{name} is {tensor.dtype}, expected {expected} by wire = {wire!r}")
        else:
            plain[name] = tensor
    return plain


def rounding_error(tensor: Tensor, wire: str) -> float:
    """Return a bound on the root mean square error of a tensor that travels out and back."""
    if wire == "float32" or not tensor.numel():
        return 0.0
    if wire == "int8":  # at most a step each way
        steps = _in_rows(tensor.detach()).abs().amax(1) / _STEPS
        return 2 * float(steps.square().mean().sqrt())
    # At most half of the distance to the next number each way; all subnormals have one distance.
    half = torch.finfo(_HALVES[wire])
    size = float(tensor.detach().square().mean().sqrt())
    return float(half.eps * (size + half.smallest_normal))


def num_bytes(shapes: Iterable[Sequence[int]], wire: str) -> int:
    """Return the bytes that float32 tensors of these shapes take on the wire."""
    width = {"float32": 4, "int8": 1}.get(wire, 2)
    scales = 4 if wire == "int8" else 0
    return sum(width * math.prod(shape) + scales * _num_scales(shape) for shape in shapes)


def _num_scales(shape: Sequence[int]) -> int:
    return math.prod(shape[:-2]) if len(shape) > 2 else -(-math.prod(shape) // _BLOCK)


def _in_rows(tensor: Tensor) -> Tensor:
    """Return a tensor with one row for each scale; the last row may be padded with zeros."""
    rows = _num_scales(tensor.shape)
    if tensor.ndim > 2:
        return tensor.reshape(rows, math.prod(tensor.shape[-2:]))
    flat = tensor.new_zeros(rows * _BLOCK)
    flat[: tensor.numel()] = tensor.flatten()
    return flat.view(rows, _BLOCK)


def _to_steps(tensor: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the steps as int8 in the tensor's shape, and the scale of each row."""
    rows = _in_rows(tensor.detach().cpu())
    scales = rows.abs().amax(1) / _STEPS if rows.numel() else rows.new_zeros(len(rows))
    divisor = torch.where(scales > 0, scales, 1.0)[:, None]
    steps = (rows / divisor + torch.rand(rows.shape, generator=random)).floor_()
    steps = steps.clamp_(-_STEPS, _STEPS).to(torch.int8)
    return steps.flatten()[: tensor.numel()].view(tensor.shape), scales


def _from_steps(name: str, steps: Tensor, scales: Tensor | None) -> Tensor:
    number = _num_scales(steps.shape)
    if scales is None or scales.dtype != torch.float32 or tuple(scales.shape) != (number,):
        form = "none" if scales is None else f"{scales.dtype} {tuple(scales.shape)}"
        raise ValueError(f"{name}{_SCALES} is {form}, expected torch.float32 ({number},)")
    if not (scales.isfinite() & (scales >= 0)).all():
        raise ValueError(f"{name}{_SCALES} has values that are negative or not finite")
    plain = steps.to(torch.float32, memory_format=torch.contiguous_format)
    flat = plain.view(-1)
    width = math.prod(steps.shape[-2:]) if steps.ndim > 2 else _BLOCK
    split = flat.numel() // width * width if width else 0  # the last row may be shorter
    flat[:split].view(-1, max(width, 1)).mul_(scales[: split // max(width, 1), None])
    flat[split:].mul_(scales[-1:])
    return plain
