"""Sum replies so that a few false ones have no say: coordinate-wise median and trimmed mean.

Over the clients that trained a coordinate, where NaN stands for those that did not (a head
that a client left out). Of one or two values none is outvoted, so that a coordinate that fewer
than three clients trained stays as it was: who claims a larger budget than the others trains
heads on which it is alone, and gets nowhere by it.

What is promised, coordinate by coordinate, where n >= 3 clients trained it: the median lies
between honest values while fewer than n / 2 of them lie, the trimmed mean while no more lie than
are cut off at one end, max(1, floor(n / 5)). Every reply of a round is kept until it closes (Yin
et al., 2018).
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors

TRIMMED = 0.2  # the share of the replies that is cut off at either end, at least one
FEWEST = 3  # of fewer no middle outvotes anybody

_BLOCK = 2**18  # numbers of all replies that are sorted at a time


class RobustRound:
    """Keep the replies of a round, as tensors of the state's shapes, and take their middle."""

    def __init__(self, state: Tensors, how: str) -> None:
        self.state, self.how = state, how
        self.replies: dict[str, list[Tensor]] = {name: [] for name in state}

    def add(self, filled: Mapping[str, Tensor], weight: float) -> None:  # noqa: ARG002
        """Add one more reply; all weigh the same."""
        for name, tensors in self.replies.items():
            tensors.append(filled[name])

    def close(self) -> Tensors:
        """Return the next state."""
        return {name: self._close(name, tensors) for name, tensors in self.replies.items()}

    def _close(self, name: str, replies: list[Tensor]) -> Tensor:
        """Take the middle block by block, so that one block at a time is copied and sorted."""
        if not replies:
            return self.state[name]
        old = self.state[name].reshape(-1)
        flat = [reply.reshape(-1) for reply in replies]
        new = torch.empty_like(old)
        side = max(1, _BLOCK // len(flat))
        for start in range(0, len(old), side):
            part = slice(start, start + side)
            new[part] = middle(old[part], [reply[part] for reply in flat], self.how)
        return new.view(self.state[name].shape)


def middle(old: Tensor, replies: list[Tensor], how: str) -> Tensor:
    """Return the median, or the mean without the largest and smallest, of every coordinate."""
    stacked = torch.stack(replies).double()
    ordered = stacked.nan_to_num(torch.inf).sort(dim=0).values  # those that are missing last
    number = (~stacked.isnan()).sum(0)
    cut = (number - 1).div(2, rounding_mode="floor") if how == "median" else _cut(number)
    place = torch.arange(len(replies)).view(-1, *[1] * old.ndim)
    kept = (place >= cut) & (place < number - cut)
    total = torch.where(kept, ordered, 0.0).sum(0)
    mean = total / kept.sum(0).clamp(min=1)
    return torch.where(number >= FEWEST, mean, old.double()).float()


def _cut(number: Tensor) -> Tensor:
    """Return how many of so many are cut off at either end."""
    share = (number * TRIMMED).long()
    return share.clamp(min=1)
