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

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from ravan_flwr.config.keys import ROBUST
from ravan_flwr.methods.base import Tensors

TRIMMED = 0.2  # fraction of the replies that is cut off at either end; at least one reply
MIN_VALUES = ROBUST["median"]  # values needed to outvote a false one

_BLOCK = 2**18  # numbers of all replies that are sorted, or compared, at a time

Replies = Mapping[str, Sequence[Tensor]]  # all replies' values of each tensor of the state


class RobustRound:
    """Keep the replies of a round, in the state's shapes; return their robust statistic."""

    def __init__(self, state: Tensors, statistic: str) -> None:
        if statistic not in STATISTICS:
            raise ValueError(f"statistic = {statistic!r}: expected {', '.join(STATISTICS)}")
        self.state, self.statistic, self.count = state, statistic, 0
        self.replies: dict[str, list[Tensor]] = {name: [] for name in state}

    def add(self, filled: Mapping[str, Tensor], weight: float) -> None:  # noqa: ARG002
        """Add a reply; all replies have the same weight."""
        self.count += 1
        for name, tensors in self.replies.items():
            tensors.append(filled[name])

    def close(self) -> Tensors:
        """Return the next state."""
        if not self.state or self.count < ROBUST[self.statistic]:
            return dict(self.state)
        return STATISTICS[self.statistic](self.state, self.replies)


def mean_of_middle(state: Tensors, replies: Replies, cut: Callable[[Tensor], Tensor]) -> Tensors:
    """Return each number's mean without its largest and smallest values.

    NaN marks a number that a reply does not have. One that fewer than three replies have keeps its
    old value. `cut` returns how many of n values are cut off at either end.
    """

    def combine(old: Tensor, values: Tensor) -> Tensor:
        ordered = values.nan_to_num(torch.inf).sort(dim=0).values  # missing values last
        number = (~values.isnan()).sum(0)  # (numbers,): the replies that have the number
        rank = torch.arange(len(values))[:, None]  # (replies, 1)
        # (replies, numbers): the values in the middle
        mask = (rank >= cut(number)) & (rank < number - cut(number))
        mean = torch.where(mask, ordered, 0.0).sum(0) / mask.sum(0).clamp(min=1)
        return torch.where(number >= MIN_VALUES, mean, old).float()

    return _combine_by_blocks(state, replies, combine)


def mean_of_closest(state: Tensors, replies: Replies, taken: Callable[[int, int], int]) -> Tensors:
    """Return the mean of the replies that Krum takes.

    `taken` returns how many of n replies are taken, of which f may be false.
    """
    number = len(next(iter(replies.values())))
    false = max(0, (number - 3) // 2)  # f, the largest with n >= 2 f + 3
    chosen = rank_by_krum(replies.values(), number, false)[: taken(number, false)]

    def combine(old: Tensor, values: Tensor) -> Tensor:
        mean = values.mean(0)
        return torch.where(mean.isnan(), old, mean)  # no client trained it

    taken_replies = {name: [tensors[i] for i in chosen] for name, tensors in replies.items()}
    return _combine_by_blocks(state, taken_replies, combine)


STATISTICS: dict[str, Callable[[Tensors, Replies], Tensors]] = {
    "median": partial(mean_of_middle, cut=lambda n: (n - 1).div(2, rounding_mode="floor")),
    "trimmed-mean": partial(mean_of_middle, cut=lambda n: (n * TRIMMED).long().clamp(min=1)),
    "krum": partial(mean_of_closest, taken=lambda n, f: 1),  # noqa: ARG005
    "multi-krum": partial(mean_of_closest, taken=lambda n, f: n - f),
}


def _combine_by_blocks(
    state: Tensors, replies: Replies, combine: Callable[[Tensor, Tensor], Tensor]
) -> Tensors:
    """Combine the replies, block by block to bound the memory.

    `combine` takes numbers of the state, and the replies' values of them, (replies, numbers), both
    in float64.
    """
    new = {}
    for name, tensors in replies.items():
        old, flat = state[name].reshape(-1), [reply.reshape(-1) for reply in tensors]
        made = torch.empty_like(old)
        side = max(1, _BLOCK // len(flat))
        for start in range(0, len(old), side):
            part = slice(start, start + side)
            values = torch.stack([reply[part] for reply in flat]).double()
            made[part] = combine(old[part].double(), values)
        new[name] = made.view(state[name].shape)
    return new


def rank_by_krum(tensors: Iterable[Sequence[Tensor]], number: int, false: int) -> list[int]:
    """Return the places of the replies by Krum's score, the best first.

    Args:
        tensors: All replies' values of each tensor, which have one shape. A tensor that no client
            trained is NaN in all of them, and does not count.
        number: The number of replies, n.
        false: How many of them may be false, f.
    """
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
    return best
