"""Limit how far one client may move the tensors that it was sent.

An honest client takes `local-steps` steps of Adam. A step of Adam moves a number by about the
learning rate, for any gradient. So the root mean square of a change, over the numbers of a tensor,
hardly depends on the method, the data, the number of heads or the client's budget. It is limited,
tensor by tensor, before a reply reaches a sum.

With L = learning-rate * steps of the client, a change may be at most

    REACH * (L * (1 + L + root mean square of what was sent) + rounding)

The terms in L and in what was sent are RAVAN's, whose s_i H_i moves by s_i as well. Rounding is the
wire's, on the way out and back. Earlier rounds do not change the limit: after rounds of small
changes, an honest client with different examples moves as far as Adam can. A number in place of
`auto` limits only the norm of the change over all tensors.

Both limits are known before a round's replies arrive. A limit computed from the replies could
refuse one after it was accumulated, or because of their order. With local-steps=epochs:N clients
take different numbers of steps, from the number of examples that the server counts for each.

If the next state is not a mean of the uploads (FlexLoRA's is of products), a reply is also refused
if it alone would make the state larger than the server may send.

Replies within the limit may still be false; `weighting=median` is for them (aggregation.py). The
next state is checked as well. One that is not finite, or that has grown by more than all limits
allow, is never sent: the round has no effect. FlexLoRA's A has rows of norm one after a round,
independent of the initial values. The method sets that norm, so it does not count as growth.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from ravan_flwr.messages.wire import rounding_error
from ravan_flwr.methods.tensors import sum_of_squares

REACH = 1.5  # honest clients reached at most 0.8; the rest is for rounding on the wire
GROWTH = 10.0  # times a client's reach: how far a state's root mean square may grow in a round

_BLOCK = 2**17


@dataclass(frozen=True)
class Change:
    """A reply's change of one tensor, and the tensor before it, as root mean squares."""

    size: float
    before: float
    numbers: int
    rounding: float = 0.0  # of the wire


Changes = dict[str, Change]


def measure_changes(
    upload: Mapping[str, Tensor], start: Mapping[str, Tensor], wire: str = "float32"
) -> Changes:
    """Return an upload's changes of the tensors in `start`; raise ValueError if not finite."""
    return {name: _change(name, upload[name], tensor, wire) for name, tensor in start.items()}


def _change(name: str, tensor: Tensor, start: Tensor, wire: str) -> Change:
    """Return the change of one tensor, computed block by block to avoid a copy."""
    squares = before = 0.0
    parts = (flat.detach().reshape(-1).split(_BLOCK) for flat in (tensor, start))
    for new, old in zip(*parts, strict=True):
        squares += sum_of_squares(new - old, name)
        before += sum_of_squares(old, name)
    number = max(1, tensor.numel())
    size, before = math.sqrt(squares / number), math.sqrt(before / number)
    return Change(size, before, tensor.numel(), rounding_error(start, wire))


class UpdateNormCheck:
    """Check changes against a run's limit.

    Args:
        norm: The largest norm of a change; None derives the limit from the learning rate.
        max_move: How far a client's optimiser can move a number in a round: learning rate times
            steps.
            If it is 0, the checks take it for each client.
        wire: The encoding of tensors on the wire.
    """

    def __init__(self, norm: float | None, max_move: float = 0.0, wire: str = "float32") -> None:
        self.norm, self.max_move, self.wire = norm, max_move, wire

    def check(self, changes: Changes, max_move: float = 0.0) -> None:
        """Raise ValueError if an honest client with that step cannot have made these changes."""
        if self.norm is not None:
            norm = math.sqrt(sum(change.size**2 * change.numbers for change in changes.values()))
            if norm > self.norm:
                raise ValueError(
                    f"upload has a change of norm {norm:.4g}, expected at most {self.norm:g}; "
                    "lower the learning rate, or raise the limit max-update-norm"
                )
            return
        suffix = "" if self.max_move else " of its examples"
        for name, change in changes.items():
            max_size = self.max_size(change, max_move)
            if change.size > max_size:
                raise ValueError(
                    f"upload changes {name} by {change.size:.4g} (root mean square over its "
                    f"{change.numbers} numbers), expected at most {max_size:.4g}, which is what "
                    f"{self.max_move or max_move:g} = learning-rate x local-steps{suffix} allow; "
                    "if honest clients send this, set limits=max-update-norm=NUMBER"
                )

    def max_size(self, change: Change, max_move: float = 0.0) -> float:
        """Return the largest size that a change of that tensor may have."""
        return REACH * (_reach(self.max_move or max_move, change.before) + change.rounding)

    def check_state(
        self,
        old: Mapping[str, Tensor],
        new: Mapping[str, Tensor],
        method_norms: Mapping[str, float] | None = None,
        max_move: float = 0.0,
    ) -> None:
        """Raise ValueError if the accepted replies cannot have made the next state.

        `method_norms` has the norms that the method itself gives to tensors, however small the
        replies. `max_move` is the largest of the clients'.
        """
        for name, tensor in new.items():
            norm = math.sqrt(sum_of_squares(tensor, name))
            if norm <= (method_norms or {}).get(name, 0.0) * (1 + 1e-6):
                continue
            if old[name].shape != tensor.shape or not tensor.is_floating_point():
                continue  # a sum of products with more terms
            self.check_growth(name, old[name], norm, max_move)

    def check_growth(self, name: str, old: Tensor, norm: float, max_move: float = 0.0) -> None:
        """Raise ValueError if a tensor's norm would grow from `old` to `norm` by too much."""
        before = math.sqrt(sum_of_squares(old, name))
        root = math.sqrt(max(1, old.numel()))
        max_growth = GROWTH * root * _reach(self.max_move or max_move, before / root)
        if self.norm is not None:
            max_growth = self.norm * (1 + self.norm + before)  # a product of two changed factors
        grown = norm - before
        if grown > max_growth:
            raise ValueError(
                f"the norm of {name} would grow by {grown:.4g} in this round, expected at most "
                f"{max_growth:.4g}"
            )


def _reach(max_move: float, before: float) -> float:
    """Return how far an optimiser can move a number of size `before` in a round."""
    return max_move * (1 + max_move + before)
