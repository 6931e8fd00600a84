"""Train LoRA-FAIR: FedIT, with the mean of B corrected for what it loses (Bian et al., 2025).

The mean of the products is no product of the means. The server leaves the mean of A as it is and
adds to the mean of B what brings the product nearest to the mean product, and is itself small:

    D = argmin |mean_c(B_c A_c) - (mean B + D) mean A|^2 + lambda |D|^2
    B <- mean B + D,    A <- mean A

With the residual R = mean(B A) - mean(B) mean(A) and A = mean A, D = R A^T (A A^T + lambda)^-1.
It is not exact, since R has a larger rank than A. D is never larger than mean B's own change in
this round: a reply cannot use the correction to move B by more than replies move it.
"""

import torch
from torch import Tensor

from ravan_flwr.adapters.lowrank import ProductSum
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.co_moments import CoMoments
from ravan_flwr.methods.lora import LoraMethod

LAMBDA = 0.01


class LoraFair(LoraMethod):
    """Keep the state {"B", "A"}; an upload is the same."""

    def open_round(self, state: Tensors) -> "CorrectedMeans":
        return CorrectedMeans(self, state)


class CorrectedMeans(CoMoments):
    """Take the means of B and A, and correct that of B."""

    def __init__(self, method: LoraFair, state: Tensors) -> None:
        super().__init__(method, state)
        self.method, self.state = method, state

    def close(self) -> Tensors:
        """Make the next state."""
        if self.count < 2:  # nothing is lost
            return {name: mean.close() for name, mean in self.means.items()}
        Bs, As = self.split({name: mean.sum / self.weight for name, mean in self.means.items()})
        corrected = [
            B + bounded(correction(moment, A, self.weight), B - old)
            for B, A, old, moment in zip(
                Bs, As, self.split(self.state)[0], self.moments, strict=True
            )
        ]
        return self.method.pack(corrected, As)


def correction(moment: ProductSum, A: Tensor, weight: float) -> Tensor:
    """Find D of the residual moment / weight, (out, r)."""
    if moment.folded is not None:
        seen = moment.dense() @ A.mT
    else:
        left, right = moment.factors()
        seen = left @ (right @ A.mT)
    gram = A @ A.mT + LAMBDA * torch.eye(len(A), dtype=A.dtype)
    found: Tensor = torch.linalg.solve(gram, seen.mT / weight).mT
    return found


def bounded(D: Tensor, change: Tensor) -> Tensor:
    """Make D as small as the change is, if it is larger."""
    largest, size = float(change.norm()), float(D.norm())
    return D * (largest / size) if size > largest else D


METHOD = LoraFair
