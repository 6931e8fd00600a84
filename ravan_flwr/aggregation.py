"""The server's half of a round: what goes out; uploads, checked one by one, folded into sums.

The method knows nothing of the classifier, which is the same for all of them: it is put beside
what the method sends, and averaged beside the method's sums.

Memory does not grow with the number of clients. What is rejected never reaches a sum.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import CLASSIFIER, Mean, Method, Tensors, check_tensor


def outgoing(method: Method, state: Tensors, share: float) -> Tensors:
    """What a client with that share of the budget is sent."""
    sent = method.broadcast({k: v for k, v in state.items() if k != CLASSIFIER}, share)
    return sent | {k: v for k, v in state.items() if k == CLASSIFIER}


class Aggregate:
    """One round's sums: the method's, and the classifier's mean if it is trained."""

    def __init__(self, method: Method, state: Tensors, max_norm: float) -> None:
        self.method, self.max_norm = method, max_norm
        classifier = state.get(CLASSIFIER)
        self._classifier = None if classifier is None else Mean(classifier)
        self._round = method.open_round({k: v for k, v in state.items() if k != CLASSIFIER})
        self.count = 0

    def offer(self, upload: Mapping[str, Tensor], share: float, weight: float = 1.0) -> None:
        """Fold in an upload of a client with that share; ValueError if it is not sound."""
        own = {k: v for k, v in upload.items() if k != CLASSIFIER or self._classifier is None}
        self.method.check(own, share)
        if self._classifier is not None:
            check_tensor(upload, CLASSIFIER, self._classifier.sum.shape, torch.float32)
        check_norm(upload, self.max_norm)
        self._round.add(own, weight)
        if self._classifier is not None:
            self._classifier.add(upload[CLASSIFIER], weight)
        self.count += 1

    def close(self) -> Tensors:
        """The next global state."""
        state = self._round.close()
        if self._classifier is not None:
            state[CLASSIFIER] = self._classifier.close()
        return state


def check_norm(upload: Mapping[str, Tensor], max_norm: float) -> None:
    """Raise ValueError if the norm over all tensors is larger, or no number."""
    squares = [t.double().square().sum() for t in upload.values() if t.is_floating_point()]
    norm = float(torch.stack(squares).sum().sqrt()) if squares else 0.0
    if not norm <= max_norm:
        raise ValueError(
            f"upload has norm {norm:.4g}, expected at most {max_norm:g}; lower learning-rate, or "
            "raise max-update-norm"
        )
