"""Average heads one by one: not every client uploads every head.

An upload is {"H": (selected, r, r), "heads": packed bits}: one bit for each (layer, head), the
first in the lowest bit of the first byte, says whether it is among the selected, which follow in
that order.
"""

from collections.abc import Iterator, Mapping

import numpy as np
import torch
from torch import Tensor

from ravan_flwr.methods.means import add_to
from ravan_flwr.methods.tensors import Tensors


def pack_bits(bits: Tensor) -> Tensor:
    """Pack booleans into bytes, the first in the lowest bit."""
    return torch.from_numpy(np.packbits(bits.bool().numpy(), bitorder="little"))


def unpack_bits(packed: Tensor, number: int | None = None) -> Tensor:
    """Unpack that many booleans, or all that the bytes have room for."""
    bits = np.unpackbits(packed.numpy(), count=number, bitorder="little")
    return torch.from_numpy(bits).bool()


class HeadMeans:
    """Keep a sum and a weight for each (layer, head).

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
        at = 0
        for start, number in _runs(chosen):
            add_to(self.sum[start : start + number], upload["H"][at : at + number], weight)
            at += number
        self.weight[chosen] += weight
        self.total += weight

    def close(self) -> Tensors:
        """Make H, with the mean of every head that somebody trained."""
        trained = self.weight > 0
        H = self.old.flatten(0, 1).clone()
        mean = self.sum[trained] / self.weight[trained, None, None]
        if self.mean_over_cohort:
            mean = torch.lerp(H[trained].double(), mean, self._shares(trained))
        H[trained] = mean.float()
        return {"H": H.view_as(self.old)}

    def _shares(self, trained: Tensor) -> Tensor:
        """Return how much of all weight has trained each of those heads."""
        return (self.weight[trained] / self.total)[:, None, None]


def _runs(chosen: Tensor) -> Iterator[tuple[int, int]]:
    """Find where consecutive ones begin, and how many they are."""
    padded = torch.nn.functional.pad(chosen.to(torch.int8), (1, 1))
    edges = padded.diff().nonzero().flatten().tolist()
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        yield start, end - start
