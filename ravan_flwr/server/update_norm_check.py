"""Limit how far one client may move what it was sent.

An honest client takes `local-steps` steps of Adam, and a step of Adam moves a number by about the
learning rate, whatever the gradient: so the root mean square of a change, over the numbers of a
tensor, hardly depends on the method, the data, the number of heads or the client's budget. That
is what is limited, tensor by tensor, before a reply reaches a sum.

What the limit is has to be known before a round's replies come: were it made of them, one of them
could be refused after it was accumulated, or because of the order in which they came. Therefore,
with L = learning-rate * steps of the client,

    at first    REACH * (L * (1 + L + root mean square of what was sent) + rounding)
    later       FACTOR * median over the last rounds of the median of the accepted changes

The first is what Adam can do at all (the terms in L and in what was sent are RAVAN's, whose
s_i H_i moves by s_i as well), and what the wire rounds on its way out and back. It holds until
ENOUGH replies were accepted, so that no first reply decides what comes after. The later limit is
never more than the first, and never less than FLOOR of it: a few that send back what they were
sent cannot shut the others out. Medians do not depend on the order of the replies. They are saved
with every checkpoint, so that a round that is run again finds those that it had. While fewer than
half of the clients lie, the median is that of honest changes. A number in place of `auto` limits
the norm of the change over all tensors, and nothing else.

Under local-epochs clients take different numbers of steps, each as many as the examples make that
the server counts for it. A client that takes more than the median one may move so much further;
one that takes fewer may move as far as the median one, within what its own L allows.

Where the next state is no mean of the uploads (FlexLoRA's is of products), a reply is refused as
well if it alone would make more of the state than what may leave the server.

Replies within the limit may still be false: that is for `weighting=median` (aggregation.py). What
leaves the server is checked as well: a next state that is not finite, or that has grown by more
than all of this allows, is never sent; the round is closed without effect. FlexLoRA's A has rows of
norm one after a round, whatever was drawn: that norm is the method's own making, and no growth.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ravan_flwr.messages.wire import rounding
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.tensors import sum_of_squares

REACH = 1.5  # honest clients were at most at 0.8; the rest is for rounding on the wire
FACTOR = 3.0  # honest clients were at most at 1.6 times the median
FLOOR = 0.1
ENOUGH = 8  # accepted replies before the median counts
ROUNDS = 8  # of which the median is taken
GROWTH = 10.0  # times the reach that a state's root mean square may grow in a round

_BLOCK = 2**17


@dataclass(frozen=True)
class Change:
    """Hold how much a reply changes one tensor, and what that was before, as sums of squares."""

    squares: float
    squares_before: float
    numbers: int
    rounding: float = 0.0  # what the wire alone may change, as a root mean square

    @property
    def size(self) -> float:
        """Return the root mean square of the change."""
        return math.sqrt(self.squares / max(1, self.numbers))

    @property
    def before(self) -> float:
        """Return the root mean square of what was sent."""
        return math.sqrt(self.squares_before / max(1, self.numbers))


Changes = dict[str, Change]


def changes_of(
    upload: Mapping[str, Tensor], start: Mapping[str, Tensor], wire: str = "float32"
) -> Changes:
    """Measure what an upload changes in the tensors of `start`; ValueError if it is not finite."""
    return {name: _change(name, upload[name], tensor, wire) for name, tensor in start.items()}


def _change(name: str, tensor: Tensor, start: Tensor, wire: str) -> Change:
    """Measure one tensor block by block, so that no copy of it is made."""
    squares = before = 0.0
    parts = (flat.detach().reshape(-1).split(_BLOCK) for flat in (tensor, start))
    for new, old in zip(*parts, strict=True):
        squares += sum_of_squares(new - old, name)
        before += sum_of_squares(old, name)
    return Change(squares, before, tensor.numel(), rounding(start, wire))


class UpdateNormCheck:
    """Check changes against the limit of a run, and remember the medians of those accepted.

    `norm` None makes it adaptive; `step` is how far a client's optimiser can move a number in a
    round, learning rate times steps, 0 where that is told client by client; `wire` is how tensors
    travel.
    """

    def __init__(
        self,
        norm: float | None,
        step: float = 0.0,
        memory: Mapping[str, Tensor] | None = None,
        wire: str = "float32",
    ) -> None:
        self.norm, self.step, self.wire = norm, step, wire
        # name -> (rounds, 2): the median of the accepted changes, and how many they were;
        # (rounds, 3) with the median of these clients' steps, where they differ
        self._rounds: Tensors = dict(memory or {})

    @property
    def memory(self) -> Tensors:
        """Return the medians, for the checkpoint."""
        return dict(self._rounds)

    def check(self, changes: Changes, step: float = 0.0) -> None:
        """Raise ValueError if a client, with that step, cannot have made these changes."""
        if self.norm is not None:
            norm = math.sqrt(sum(change.squares for change in changes.values()))
            if norm > self.norm:
                raise ValueError(
                    f"upload has a change of norm {norm:.4g}, expected at most {self.norm:g}; "
                    "lower the learning rate, or raise the limit max-update-norm"
                )
            return
        for name, change in changes.items():
            most, why = self._most(name, change, step)
            if change.size > most:
                raise ValueError(
                    f"upload changes {name} by {change.size:.4g} (root mean square over its "
                    f"{change.numbers} numbers), expected at most {most:.4g}, {why}; if honest "
                    "clients send this, set limits=max-update-norm=NUMBER"
                )

    def _most(self, name: str, change: Change, step: float = 0.0) -> tuple[float, str]:
        """Return the largest size that a change of that tensor may have, and the reason."""
        step = self.step or step
        reach = REACH * (_reach(step, change.before) + change.rounding)
        rounds = self._rounds.get(name)
        if rounds is None or float(rounds[:, 1].sum()) < ENOUGH:
            own = "" if self.step else " of its examples"
            return reach, f"which is what {step:g} = learning-rate x local-steps{own} allow"
        usual = statistics.median(rounds[:, 0].tolist())
        if not self.step:
            usual *= max(1.0, step / (statistics.median(rounds[:, 2].tolist()) or step or 1.0))
        most = min(reach, max(FACTOR * usual, FLOOR * reach))
        return most, f"where {usual:.4g} was usual in the last rounds"

    def learn(self, accepted: Sequence[Changes], steps: Sequence[float] = ()) -> None:
        """Remember the median of a round's accepted changes, and of their clients' steps."""
        usual = [] if self.step else [statistics.median(steps or [0.0])]
        for name in accepted[0] if accepted else ():
            median = statistics.median(changes[name].size for changes in accepted)
            row = torch.tensor([[median, len(accepted), *usual]], dtype=torch.float64)
            rounds = self._rounds.get(name, row[:0])
            self._rounds[name] = torch.cat([rounds, row])[-ROUNDS:]

    def check_state(
        self,
        old: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        made: Mapping[str, float] | None = None,
        step: float = 0.0,
    ) -> None:
        """Raise ValueError if a next state is one that the accepted replies cannot have made.

        `made` has the norms that the method itself gives to tensors, however small the replies, and
        `step` is the largest of the clients'.
        """
        for name, tensor in new.items():
            norm = math.sqrt(sum_of_squares(tensor, name))
            if norm <= (made or {}).get(name, 0.0) * (1 + 1e-6):
                continue
            if old[name].shape != tensor.shape or not tensor.is_floating_point():
                continue  # a sum of products that has become longer
            self.check_growth(name, old[name], norm, step)

    def check_growth(self, name: str, old: Tensor, norm: float, step: float = 0.0) -> None:
        """Raise ValueError if a tensor of the state may not have that norm next."""
        before = math.sqrt(sum_of_squares(old, name))
        root = math.sqrt(max(1, old.numel()))
        most = GROWTH * root * _reach(self.step or step, before / root)
        if self.norm is not None:
            most = self.norm * (1 + self.norm + before)  # a product of two factors that changed
        grown = norm - before
        if grown > most:
            raise ValueError(
                f"the norm of {name} would grow by {grown:.4g} in this round, expected at most "
                f"{most:.4g}"
            )


def _reach(step: float, before: float) -> float:
    """Return how far an optimiser can move a number in a round, where it was that large."""
    return step * (1 + step + before)
