"""Sums that a few false replies do not move: coordinate-wise median and trimmed mean.

Over the clients that trained a coordinate, where NaN stands for those that did not (a head
that a client left out). A coordinate that nobody trained stays as it was. Every reply of a
round is kept until it closes (Yin et al., 2018).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors

TRIMMED = 0.2  # the share of the replies that is cut off at either end, at least one of three


class RobustRound:
    """The replies of a round, as tensors of the state's shapes, and their middle."""

    def __init__(self, state: Tensors, how: str) -> None:
        self.state, self.how = state, how
        self.replies: dict[str, list[Tensor]] = {name: [] for name in state}

    def add(self, filled: Mapping[str, Tensor], weight: float) -> None:  # noqa: ARG002
        """One more reply; all weigh the same."""
        for name, tensors in self.replies.items():
            tensors.append(filled[name])

    def close(self) -> Tensors:
        """The next state."""
        return {
            name: middle(self.state[name], tensors, self.how) if tensors else self.state[name]
            for name, tensors in self.replies.items()
        }


def middle(old: Tensor, replies: list[Tensor], how: str) -> Tensor:
    """The median, or the mean without the largest and the smallest, of every coordinate."""
    stacked = torch.stack(replies).double()
    ordered = stacked.nan_to_num(torch.inf).sort(dim=0).values  # those that are missing last
    number = (~stacked.isnan()).sum(0)
    cut = (number - 1).div(2, rounding_mode="floor") if how == "median" else _cut(number)
    place = torch.arange(len(replies)).view(-1, *[1] * old.ndim)
    kept = (place >= cut) & (place < number - cut)
    total = torch.where(kept, ordered, 0.0).sum(0)
    return torch.where(number > 0, total / kept.sum(0).clamp(min=1), old.double()).float()


def _cut(number: Tensor) -> Tensor:
    """How many at either end, of so many."""
    share = (number * TRIMMED).long()
    return torch.where(number >= 3, share.clamp(min=1), torch.zeros_like(number))
