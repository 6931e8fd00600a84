"""Robust statistics of a round's replies: a few false replies have little effect on them.

`median` and `trimmed-mean` combine each number by itself (Yin et al., 2018), over the clients that
trained it. NaN marks a client that did not, because it left out the head. One or two values cannot
outvote a false one. So a coordinate that fewer than three clients trained keeps its value: a client
that claims a larger budget than the others, and alone trains some heads, does not change them.

Guarantee for a coordinate that n >= 3 clients trained: the median is between honest values if fewer
than n / 2 clients are false. The trimmed mean is if at most max(1, floor(n / 5)) are false, as many
as it cuts off at one end.

`krum` and `multi-krum` compare whole updates (Blanchard et al., 2017). The score of a reply is the
sum of its squared distances to the n - f - 2 replies that are closest to it, if f of n replies may
be false. Krum takes the reply with the smallest score, multi-Krum the mean of the n - f replies
with the smallest scores. The paper needs n >= 2 f + 3; here f is the largest such number. It is 0
with fewer than five replies, and the state then stays as it was.

Guarantee for n >= 5 replies: up to f false replies are not taken if they are far from the honest
ones, whether they agree or not: two honest replies at least are among the n - f - 2 closest to a
false one. If the honest updates are independent draws around g, whose root mean square distance
from g is below |g| / eta, the expectation of Krum's result has a positive product with g
(proposition 1 of the paper; for this f, eta is about n^1.5 / 2). A false reply that lies among the
honest ones can be taken.

Every reply of a round is kept until the round closes.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.config.keys import KRUM, ROBUST
from ravan_flwr.methods.base import Tensors

TRIMMED = 0.2  # fraction of the replies that is cut off at either end; at least one reply
MIN_VALUES = ROBUST["median"]  # values needed to outvote a false one

_BLOCK = 2**18  # numbers of all replies that are sorted, or compared, at a time


class RobustRound:
    """Keep the replies of a round, in the state's shapes; return their robust statistic."""

    def __init__(self, state: Tensors, statistic: str) -> None:
        self.state, self.statistic, self.count = state, statistic, 0
        self.replies: dict[str, list[Tensor]] = {name: [] for name in state}

    def add(self, filled: Mapping[str, Tensor], weight: float) -> None:  # noqa: ARG002
        """Add a reply; all replies have the same weight."""
        self.count += 1
        for name, tensors in self.replies.items():
            tensors.append(filled[name])

    def close(self) -> Tensors:
        """Return the next state."""
        if self.count < ROBUST[self.statistic]:
            return dict(self.state)
        taken: Sequence[int] = range(self.count)
        if self.statistic in KRUM:
            taken = choose_by_krum(self.replies.values(), self.count, self.statistic)
        return {
            name: self._close(name, [tensors[number] for number in taken])
            for name, tensors in self.replies.items()
        }

    def _close(self, name: str, replies: list[Tensor]) -> Tensor:
        """Combine the replies taken, block by block to bound the memory."""
        old = self.state[name].reshape(-1)
        flat = [reply.reshape(-1) for reply in replies]
        new = torch.empty_like(old)
        side = max(1, _BLOCK // len(flat))
        for start in range(0, len(old), side):
            part = slice(start, start + side)
            block = [reply[part] for reply in flat]
            if self.statistic in KRUM:
                mean = torch.stack(block).double().mean(0)
                new[part] = torch.where(mean.isnan(), old[part].double(), mean)  # not trained
            else:
                new[part] = median_or_trimmed_mean(old[part], block, self.statistic)
        return new.view(self.state[name].shape)


def median_or_trimmed_mean(old: Tensor, replies: list[Tensor], statistic: str) -> Tensor:
    """Return each coordinate's median, or its mean without the largest and smallest values.

    A coordinate that fewer than three replies have keeps its old value. `old` and each reply have
    one shape; NaN marks a coordinate that a reply does not have.
    """
    stacked = torch.stack(replies).double()  # (replies, *shape)
    ordered = stacked.nan_to_num(torch.inf).sort(dim=0).values  # missing values last
    number = (~stacked.isnan()).sum(0)  # (*shape): the replies that have the coordinate
    if statistic == "median":
        cut = (number - 1).div(2, rounding_mode="floor")
    elif statistic == "trimmed-mean":
        cut = (number * TRIMMED).long().clamp(min=1)
    else:
        raise ValueError(f"statistic = {statistic!r}: expected median or trimmed-mean")
    rank = torch.arange(len(replies)).view(-1, *[1] * old.ndim)  # (replies, 1, ...)
    mask = (rank >= cut) & (rank < number - cut)  # (replies, *shape): the values in the middle
    total = torch.where(mask, ordered, 0.0).sum(0)
    mean = total / mask.sum(0).clamp(min=1)
    return torch.where(number >= MIN_VALUES, mean, old.double()).float()


def choose_by_krum(
    tensors: Iterable[Sequence[Tensor]], number: int, statistic: str
) -> Sequence[int]:
    """Return the places of the replies that Krum or multi-Krum takes, the best first.

    Args:
        tensors: All replies' values of each tensor, which have one shape. A tensor that no client
            trained is NaN in all of them, and does not count.
        number: The number of replies, n.
        statistic: `krum` for the best reply, `multi-krum` for all but the f worst ones.
    """
    false = max(0, (number - 3) // 2)  # f, the largest with n >= 2 f + 3
    distances = torch.zeros(number, number, dtype=torch.float64)  # squared
    for replies in tensors:
        flat = [reply.reshape(-1).split(max(1, _BLOCK // number)) for reply in replies]
        for block in zip(*flat, strict=True):
            rows = torch.stack(block).double().nan_to_num(0.0)  # (replies, numbers)
            # By default torch takes x x - 2 x y + y y, whose differences are less exact.
            exact = "donot_use_mm_for_euclid_dist"
            distances += torch.cdist(rows, rows, compute_mode=exact).square()
    distances.fill_diagonal_(torch.inf)  # a reply is not one of those closest to itself
    scores = distances.sort().values[:, : number - false - 2].sum(1)
    best: list[int] = scores.argsort(stable=True).tolist()
    if statistic == "krum":
        return best[:1]
    if statistic == "multi-krum":
        return best[: number - false]
    raise ValueError(f"statistic = {statistic!r}: expected krum or multi-krum")
