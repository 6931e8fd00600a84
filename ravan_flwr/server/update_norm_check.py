"""Limit how far one client may move what it was sent.

An honest client takes `local-steps` steps of Adam, and a step of Adam moves a number by about the
learning rate, whatever the gradient: so the root mean square of a change, over the numbers of a
tensor, hardly depends on the method, the data, the number of heads or the client's budget. That
is what is limited, tensor by tensor, before a reply reaches a sum.

With L = learning-rate * steps of the client, a change may be at most

    REACH * (L * (1 + L + root mean square of what was sent) + rounding)

The terms in L and in what was sent are RAVAN's, whose s_i H_i moves by s_i as well; rounding is the
wire's, on its way out and back. Earlier rounds do not change the limit: after quiet rounds a client
with examples of another kind moves as far as Adam can, and is honest. A number in place of `auto`
limits the norm of the change over all tensors, and nothing else.

Both limits are known before a round's replies come: were one made of them, a reply could be refused
after it was accumulated, or because of the order in which they came. Under local-epochs clients
take different numbers of steps, each as many as the examples make that the server counts for it.

Where the next state is no mean of the uploads (FlexLoRA's is of products), a reply is refused as
well if it alone would make more of the state than what may leave the server.

Replies within the limit may still be false: that is for `weighting=median` (aggregation.py). What
leaves the server is checked as well: a next state that is not finite, or that has grown by more
than all of this allows, is never sent; the round is closed without effect. FlexLoRA's A has rows of
norm one after a round, whatever was drawn: that norm is the method's own making, and no growth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ravan_flwr.messages.wire import rounding
from ravan_flwr.methods.tensors import sum_of_squares

REACH = 1.5  # honest clients were at most at 0.8; the rest is for rounding on the wire
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
    """Check changes against the limit of a run.

    `norm` None makes it follow the learning rate; `step` is how far a client's optimiser can move a
    number in a round, learning rate times steps, 0 where that is told client by client; `wire` is
    how tensors travel.
    """

    def __init__(self, norm: float | None, step: float = 0.0, wire: str = "float32") -> None:
        self.norm, self.step, self.wire = norm, step, wire

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
        own = "" if self.step else " of its examples"
        for name, change in changes.items():
            most = self.most(change, step)
            if change.size > most:
                raise ValueError(
                    f"upload changes {name} by {change.size:.4g} (root mean square over its "
                    f"{change.numbers} numbers), expected at most {most:.4g}, which is what "
                    f"{self.step or step:g} = learning-rate x local-steps{own} allow; if honest "
                    "clients send this, set limits=max-update-norm=NUMBER"
                )

    def most(self, change: Change, step: float = 0.0) -> float:
        """Return the largest size that a change of that tensor may have."""
        return REACH * (_reach(self.step or step, change.before) + change.rounding)

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
