"""Make what is sent to clients; check their uploads one by one and accumulate them.

The method knows nothing of the classifier, which is the same for all of them: it is put beside
what the method sends, and averaged beside the method's sums.

Memory does not grow with the number of clients, but for a robust round, and under methods whose
sums keep every reply until they close. What is rejected never reaches a sum.
"""

import math
from collections.abc import Mapping
from functools import lru_cache, partial

import torch
from torch import Tensor

from ravan_flwr.messages.sparsity import changed
from ravan_flwr.methods.base import Method, Sums, Tensors, split_classifier
from ravan_flwr.methods.extensions import Calibration, norm_limits
from ravan_flwr.methods.tensors import Means, MeansBySize, check_form, check_names, check_tensor
from ravan_flwr.server.update_norm_check import UpdateNormCheck, changes_of

KEPT_BROADCASTS = 4  # of the budget, whose broadcasts are kept during a round


def outgoing(method: Method, state: Tensors, fraction: float) -> Tensors:
    """Return what a client with that budget fraction is sent."""
    own, classifier = split_classifier(state)
    return method.broadcast(own, fraction) | classifier


def check_upload(
    method: Method, upload: Mapping[str, Tensor], classifier: Tensors, fraction: float
) -> Tensors:
    """Return the method's own part of an upload of a client with that budget fraction.

    ValueError if its form is not sound; `classifier` has the classifier's state, if it travels.
    """
    own = {name: tensor for name, tensor in upload.items() if name not in classifier}
    method.check(own, fraction)
    for name, tensor in classifier.items():
        check_form(upload, name, tensor.shape, torch.float32)
    return own


def moved(method: Method, change: Tensors, fraction: float, state: Tensors) -> Tensors:
    """Make the upload of a client with that budget fraction that has changed the state by so much.

    ValueError if the change's form is not sound.
    """
    check_upload(method, change, split_classifier(state)[1], fraction)
    return changed(method, change, outgoing(method, state, fraction))


class Aggregate:
    """Keep one round's sums: the method's, and the classifier's mean if it is trained.

    `robust` puts a median or a trimmed mean in the place of the means, for methods whose next
    state is one.
    """

    def __init__(
        self, method: Method, state: Tensors, limit: UpdateNormCheck, robust: str = "none"
    ) -> None:
        self.method, self.limit, self._norms = method, limit, norm_limits(method)
        self._state, self._classifier = split_classifier(state)
        self._robust = robust != "none"
        # What clients were sent, by share: few shares are kept, however many clients there are.
        self._sent = lru_cache(maxsize=KEPT_BROADCASTS)(partial(method.broadcast, self._state))
        self._rounds: tuple[Sums, Sums] = (
            (RobustRound(self._state, robust), RobustRound(self._classifier, robust))
            if self._robust
            else (method.open_round(self._state), Means(self._classifier))
        )
        self.count = 0  # accepted uploads
        self._step = 0.0  # the largest learning rate times steps of their clients
        self._alone: dict[str, float] = {}  # the largest of their norms alone

    def offer(
        self, upload: Mapping[str, Tensor], fraction: float, weight: float = 1.0, step: float = 0.0
    ) -> None:
        """Accumulate the upload of a client with that budget; ValueError if it is not sound.

        `step` is the client's learning rate times its steps, for a limit that has none for all.
        """
        own = check_upload(self.method, upload, self._classifier, fraction)
        sent = self._norms.start_of(own, self._sent(fraction))
        start = sent | self._classifier
        self.limit.check(changes_of(upload, start, self.limit.wire), step)
        alone = self._norms.norms_alone(own, sent)
        for name, norm in alone.items():
            self.limit.check_growth(name, self._state.get(name, start[name]), norm, step)
        if self._robust:
            own = self.method.expand_upload(own, self._state)
        of_method, of_classifier = self._rounds
        of_method.add(own, weight)
        of_classifier.add(upload, weight)
        self.count += 1
        self._step = max(self._step, step)
        self._alone |= {name: max(norm, self._alone.get(name, 0.0)) for name, norm in alone.items()}

    def close(self) -> Tensors:
        """Return the next global state; ValueError if the accepted replies cannot have made it.

        Without any it is the last one.
        """
        if not self.count:
            return self._state | self._classifier
        of_method, of_classifier = self._rounds
        new = of_method.close() | of_classifier.close()
        made = self._norms.norms_made(self._state, self._alone)
        self.limit.check_state(self._state | self._classifier, new, made, self._step)
        return new


class CalibrationSums:
    """Add up a calibration's uploads; one that changes more than the limit allows is refused.

    `norm` and `step` are those of `UpdateNormCheck`. No step bounds a gradient: there, sketches far
    larger than most are left out of the mean.
    """

    def __init__(
        self, calibration: Calibration, norm: float | None, step: float, robust: str = "none"
    ) -> None:
        self.calibration = calibration
        self.start = {calibration.name: torch.zeros(sum(calibration.sizes))}
        self.limit = UpdateNormCheck(norm, step if calibration.by_steps else math.inf)
        if robust != "none":
            self.sums: Sums = RobustRound(self.start, robust)
        else:
            self.sums = (Means if calibration.by_steps else MeansBySize)(self.start)

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one more upload; ValueError if it is refused."""
        check_names(upload, [*self.start])
        for name, tensor in self.start.items():
            check_tensor(upload, name, tensor.shape, torch.float32)
        self.limit.check(changes_of(upload, self.start))
        self.sums.add(upload, weight)

    def close(self) -> tuple[Tensors, Tensors]:
        """Make the fixed tensors, and what they change in the initial state."""
        mean = self.sums.close()[self.calibration.name]
        return self.calibration.make(mean.split(self.calibration.sizes))


# Robust sums: of the clients that trained a coordinate, where NaN stands for those that did not (a
# head that a client left out). Of one or two values none is outvoted, so that a coordinate that
# fewer than three clients trained stays as it was: who claims a larger budget than the others
# trains heads on which it is alone, and gets nowhere by it.
#
# What is promised, coordinate by coordinate, where n >= 3 clients trained it: the median lies
# between honest values while fewer than n / 2 of them lie, the trimmed mean while no more lie than
# are cut off at one end, max(1, floor(n / 5)). Every reply of a round is kept until it closes (Yin
# et al., 2018).

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
    cut = (number * TRIMMED).long().clamp(min=1)
    if how == "median":
        cut = (number - 1).div(2, rounding_mode="floor")
    place = torch.arange(len(replies)).view(-1, *[1] * old.ndim)
    mask = (place >= cut) & (place < number - cut)
    total = torch.where(mask, ordered, 0.0).sum(0)
    mean = total / mask.sum(0).clamp(min=1)
    return torch.where(number >= FEWEST, mean, old.double()).float()
