"""The server's half of a round: what goes out; uploads, checked one by one, folded into sums.

The method knows nothing of the classifier, which is the same for all of them: it is put beside
what the method sends, and averaged beside the method's sums.

Memory does not grow with the number of clients, but for a robust round, which keeps every reply
until it closes. What is rejected never reaches a sum.
"""

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import (
    CLASSIFIER,
    Method,
    Round,
    Tensors,
    check_form,
    sum_of_squares,
)
from ravan_flwr.methods.means import Means
from ravan_flwr.robust import RobustRound


def outgoing(method: Method, state: Tensors, share: float) -> Tensors:
    """What a client with that share of the budget is sent."""
    sent = method.broadcast({k: v for k, v in state.items() if k != CLASSIFIER}, share)
    return sent | {k: v for k, v in state.items() if k == CLASSIFIER}


class Aggregate:
    """One round's sums: the method's, and the classifier's mean if it is trained.

    `robust` puts a median or a trimmed mean in the place of the means, for methods whose next
    state is one.
    """

    def __init__(
        self, method: Method, state: Tensors, max_norm: float, robust: str = "none"
    ) -> None:
        self.method, self.max_norm = method, max_norm
        self._state = {k: v for k, v in state.items() if k != CLASSIFIER}
        self._classifier = {k: v for k, v in state.items() if k == CLASSIFIER}
        self._robust = robust != "none"
        self._rounds: tuple[Round, Round] = (
            (RobustRound(self._state, robust), RobustRound(self._classifier, robust))
            if self._robust
            else (method.open_round(self._state), Means(self._classifier))
        )
        self.count = 0

    def offer(self, upload: Mapping[str, Tensor], share: float, weight: float = 1.0) -> None:
        """Fold in an upload of a client with that share; ValueError if it is not sound."""
        own = {k: v for k, v in upload.items() if k not in self._classifier}
        self.method.check(own, share)
        for name, tensor in self._classifier.items():
            check_form(upload, name, tensor.shape, torch.float32)
        check_norm(upload, self.max_norm)
        if self._robust:
            own = self.method.filled(own, self._state)
        of_method, of_classifier = self._rounds
        of_method.add(own, weight)
        of_classifier.add(upload, weight)
        self.count += 1

    def close(self) -> Tensors:
        """The next global state."""
        of_method, of_classifier = self._rounds
        return of_method.close() | of_classifier.close()


def check_norm(upload: Mapping[str, Tensor], max_norm: float) -> None:
    """Raise ValueError if a number is not finite, or the norm over all tensors is larger."""
    norm = math.sqrt(sum(sum_of_squares(tensor, name) for name, tensor in upload.items()))
    if norm > max_norm:
        raise ValueError(
            f"upload has norm {norm:.4g}, expected at most {max_norm:g}; lower learning-rate, or "
            "raise max-update-norm"
        )
