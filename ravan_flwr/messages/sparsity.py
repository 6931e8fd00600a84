"""Send only the numbers of largest magnitude, with their places (FLASC, arXiv 2406.05233).

    down    a client starts from the largest fraction DOWN of the state's numbers, zero elsewhere
    train   all numbers
    up      the largest fraction UP of the client's change, which the server adds to its state

The server's state is dense. A client's change is relative to the broadcast that it received. All
heads of a tensor send equally many numbers. All other tensors are ranked together, as in the paper.
Tensors that no client trains (a sum of earlier products, counts) travel whole.

A head, or all other tensors together, is one row of n numbers: max(1, floor(density n)) of them
travel. Their places are a bit mask of the row, or indices of 1, 2, 4 or 8 bytes, whichever is
smaller. A dense tensor's shape travels as the shape of an array without bytes.
"""

import math
from collections.abc import Iterable, Mapping, Sequence, Set
from fractions import Fraction

import numpy as np
import torch
from torch import Tensor

from ravan_flwr.messages import wire
from ravan_flwr.methods.base import CLASSIFIER, Method, Tensors

FLAT = "largest"  # the name of the numbers of all tensors without heads
PLACES, SHAPE = "/places", "/form"

Sparsity = tuple[Fraction, Fraction]  # densities of broadcasts and uploads
WHOLE: Sparsity = (Fraction(1), Fraction(1))


def sparsity_of_round(sparsity: Sparsity, number: int) -> Sparsity:
    """Return the densities of a round; a calibration, which is round 0, sends all numbers."""
    return sparsity if number else WHOLE


def sent_sparsely(method: Method) -> set[str]:
    """Return the names of the tensors of which a broadcast sends the largest numbers."""
    return method.trained_tensors() | {CLASSIFIER}


# Rows of numbers.


def top_k(numbers: int, density: Fraction) -> int:
    """Return how many numbers of a row travel."""
    return max(1, math.floor(density * numbers))


def _index_width(numbers: int) -> int:
    """Return the bytes of an index into a row."""
    return next(width for width in (1, 2, 4, 8) if numbers <= 256**width)


def _place_bytes(numbers: int, k: int) -> tuple[int, bool]:
    """Return the bytes of a row's places, and whether they are a bit mask."""
    bits, indices = -(-numbers // 8), k * _index_width(numbers)
    return min(bits, indices), bits <= indices


def largest(rows: Tensor, k: int) -> Tensor:
    """Return a mask of each row's `k` numbers of largest magnitude; the first of equal numbers."""
    sizes = rows.detach().abs().nan_to_num(nan=torch.inf)  # the server rejects non-finite numbers
    smallest = sizes.topk(k, dim=1).values[:, -1:]
    above, tied = sizes > smallest, sizes == smallest
    room = k - above.sum(1, keepdim=True)
    return above | (tied & (tied.cumsum(1) <= room))


def _write_places(mask: Tensor, k: int) -> Tensor:
    """Return the places in each row's mask as bytes, (rows, bytes)."""
    rows, numbers = mask.shape
    if _place_bytes(numbers, k)[1]:
        return torch.from_numpy(np.packbits(mask.numpy(), axis=1, bitorder="little"))
    width = _index_width(numbers)
    places = mask.nonzero()[:, 1].numpy().astype(f"<u{width}")
    return torch.from_numpy(places.view(np.uint8).reshape(rows, k * width))


def _read_places(name: str, places: Tensor, numbers: int, k: int) -> Tensor:
    """Return the places in each row, (rows, k); raise ValueError for malformed places."""
    rows = places.numpy()
    if _place_bytes(numbers, k)[1]:
        mask = np.unpackbits(rows, axis=1, bitorder="little")
        if mask[:, numbers:].any() or (mask.sum(1, dtype=np.int64) != k).any():
            raise ValueError(f"{name} marks other places than {k} of {numbers} in each row")
        return torch.from_numpy(np.nonzero(mask)[1].reshape(len(rows), k))
    indices = np.ascontiguousarray(rows).view(f"<u{_index_width(numbers)}").astype(np.int64)
    if (np.diff(indices, axis=1) <= 0).any() or (indices >= numbers).any():
        raise ValueError(
            f"{name} has indices that are repeated, out of order or out of range, expected "
            f"ascending ones below {numbers}"
        )
    return torch.from_numpy(indices)


# Messages.


def sparsify(tensors: Mapping[str, Tensor], density: Fraction, names: Set[str]) -> Tensors:
    """Replace the named float32 tensors by their largest numbers, with places and shapes.

    The result travels as `wire.encode` encodes it.
    """
    coded, rows = dict(tensors), dict[str, Tensor]()
    if density == 1:
        return coded
    chosen = [n for n in sorted(names & tensors.keys()) if tensors[n].dtype == torch.float32]
    chosen = [name for name in chosen if tensors[name].numel()]
    plain = [name for name in chosen if tensors[name].ndim <= 2]
    for name in chosen:
        tensor = coded.pop(name).detach().cpu()
        coded[name + SHAPE] = torch.empty((0, *tensor.shape), dtype=torch.uint8)
        if name not in plain:
            rows[name] = tensor.reshape(*tensor.shape[:-2], -1)
    if plain:
        rows[FLAT] = torch.cat([tensors[name].detach().cpu().flatten() for name in plain])
    for name, row in rows.items():
        table = row.reshape(-1, row.shape[-1])
        k = top_k(table.shape[1], density)
        mask, lead = largest(table, k), row.shape[:-1]
        # A head's numbers keep three dimensions, so that int8 has a scale for each head.
        coded[name] = table[mask].view(*lead, k, 1) if lead else table[mask]
        coded[name + PLACES] = _write_places(mask, k).view(*lead, -1)
    return coded


def densify(
    coded: Mapping[str, Tensor], density: Fraction, max_numbers: int | None = None
) -> Tensors:
    """Return the dense tensors of `sparsify`'s result; raise ValueError for other input.

    With `max_numbers`, as for an upload, raise ValueError for more numbers before any tensor is
    filled. A tensor of numbers that is not sparse is then rejected too.
    """
    if density == 1:
        return dict(coded)
    shapes = _shapes(coded)
    numbers = sum(map(math.prod, shapes.values()))
    if max_numbers is not None and numbers > max_numbers:
        raise ValueError(f"its tensors have {numbers} numbers, expected {max_numbers} at most")
    plain = {name: shape for name, shape in shapes.items() if len(shape) <= 2}
    dense: Tensors = {}
    if plain:
        sizes = [math.prod(shape) for shape in plain.values()]
        parts = _filled(coded, FLAT, (), sum(sizes), density).split(sizes)
        dense |= {n: p.view(plain[n]) for n, p in zip(plain, parts, strict=True)}
    for name, shape in shapes.items():
        if name not in plain:
            filled = _filled(coded, name, shape[:-2], math.prod(shape[-2:]), density)
            dense[name] = filled.view(shape)
    used = {name + SHAPE for name in shapes} | {FLAT, FLAT + PLACES} | dense.keys()
    used |= {name + PLACES for name in dense}
    remainder = {name: tensor for name, tensor in coded.items() if name not in used}
    for name, tensor in remainder.items():
        has_numbers = max_numbers is not None and tensor.is_floating_point() and tensor.numel()
        if has_numbers or name.endswith(PLACES):
            raise ValueError(
                f"{name} is no part of a sparse upload, expected it with {name}{SHAPE}"
            )
    return remainder | dense


def _shapes(coded: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the dense tensors, in the order of their names."""
    shapes = {}
    for name in sorted(name for name in coded if name.endswith(SHAPE)):
        empty = coded[name]  # (0, *shape)
        if empty.dtype != torch.uint8 or empty.ndim < 2 or empty.shape[0] or 0 in empty.shape[1:]:
            raise ValueError(
                f"{name} is {empty.dtype} {tuple(empty.shape)}, expected torch.uint8 and a shape "
                "of 0 and a tensor's sides"
            )
        shapes[name.removesuffix(SHAPE)] = tuple(empty.shape[1:])
    return shapes


def _filled(
    coded: Mapping[str, Tensor], name: str, lead: Sequence[int], numbers: int, density: Fraction
) -> Tensor:
    """Return one tensor's dense rows, (rows, numbers); (numbers,) for all tensors without heads."""
    k = top_k(numbers, density)
    for key, dtype, shape in (
        (name, torch.float32, (*lead, k, 1) if lead else (k,)),
        (name + PLACES, torch.uint8, (*lead, _place_bytes(numbers, k)[0])),
    ):
        tensor = coded.get(key)
        if tensor is None or tensor.dtype != dtype or tuple(tensor.shape) != shape:
            got = "missing" if tensor is None else f"{tensor.dtype} {tuple(tensor.shape)}"
            raise ValueError(f"{key} is {got}, expected {dtype} {shape}")
    rows = math.prod(lead)
    places = coded[name + PLACES].reshape(rows, -1)
    at = _read_places(name + PLACES, places, numbers, k)
    dense = torch.zeros(rows, numbers).scatter_(1, at, coded[name].reshape(rows, k))
    return dense if lead else dense[0]


def num_bytes(shapes: Iterable[Sequence[int]], density: Fraction, wire_format: str) -> int:
    """Return the bytes that float32 tensors of these shapes take in a wire format."""
    shapes = [tuple(shape) for shape in shapes if math.prod(shape)]
    if density == 1:
        return wire.num_bytes(shapes, wire_format)
    total, plain = 0, sum(math.prod(shape) for shape in shapes if len(shape) <= 2)
    tables = [(shape[:-2], math.prod(shape[-2:])) for shape in shapes if len(shape) > 2]
    for lead, numbers in [*tables, *([((), plain)] if plain else [])]:
        k = top_k(numbers, density)
        values = (*lead, k, 1) if lead else (k,)
        total += wire.num_bytes([values], wire_format)
        total += math.prod(lead) * _place_bytes(numbers, k)[0]
    return total
