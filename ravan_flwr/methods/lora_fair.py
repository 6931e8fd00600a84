"""Train LoRA-FAIR: FedIT, with the mean of B corrected for what it loses (Bian et al., 2025).

The mean of the products, M = mean_c(B_c A_c), is no product of the means. The server leaves the
mean of A as it is, and adds to the mean of B what turns the product towards M, and is itself small:

    D = argmin 1 - cos(M, (mean B + D) mean A) + lambda |D|^2
    B <- mean B + D,    A <- mean A

The penalty is squared as implementations have it; digests of the paper print lambda |D|.

It is not exact, since M has a larger rank than A, and since a cosine has no length. D is never
larger than mean B's own change in this round: a reply cannot use the correction to move B by more
than replies move it.
"""

import math

import torch
from torch import Tensor

from ravan_flwr.adapters.lora import ProductSum, product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import CoMoments, LoraMethod

LAMBDA = 0.01
_MOST_STEPS = 200
_HALVINGS = 40
_GAIN = 1e-14  # of a step, below which there is nothing left to gain


class LoraFair(LoraMethod):
    """Keep the state {"B", "A"}; an upload is the same."""

    def open_round(self, state: Tensors) -> "CorrectedMeans":
        return CorrectedMeans(self, state)


class CorrectedMeans(CoMoments):
    """Take the means of B and A, and correct that of B."""

    def close(self) -> Tensors:
        """Make the next state."""
        if self.count < 2:  # nothing is lost
            return {name: mean.close() for name, mean in self.means.items()}
        means = {name: mean.sum / self.weight for name, mean in self.means.items()}
        Bs, As = self.method.split(means)
        corrected = [
            B + bounded(correction(B, A, moment, self.weight), B - old)
            for B, A, old, moment in zip(
                Bs, As, self.method.split(self.state)[0], self.sums, strict=True
            )
        ]
        return self.method.pack(corrected, As)


def correction(B: Tensor, A: Tensor, moment: ProductSum, weight: float) -> Tensor:
    """Find D, (out, r), where M = B A + moment / weight."""
    lost, size = _lost(moment, A, weight)
    gram = A @ A.mT
    product = float((B.mT @ B * gram).sum())
    norm = math.sqrt(max(0.0, product + 2 * float((B * lost).sum()) + size**2))
    sides, axes = torch.linalg.eigh(gram)
    target, mean = (B @ gram + lost) @ axes, B @ axes
    plane = Plane(target, mean, sides.clamp(min=0), norm)
    if not (norm and plane.size(plane.B)):  # no cosine
        return torch.zeros_like(B)
    minimum = plane.minimum()
    corrected: Tensor = (minimum[0] * target + minimum[1] * mean) @ axes.mT
    return corrected - B


def _lost(moment: ProductSum, A: Tensor, weight: float) -> tuple[Tensor, float]:
    """Compute R A^T and |R| of the residual R = moment / weight."""
    if moment.folded is not None:
        residual = moment.dense() / weight
        return residual @ A.mT, float(residual.norm())
    left, right = moment.factors()
    return left @ (right @ A.mT) / weight, product_norm(left, right) / weight


class Plane:
    """Minimise 1 - cos(M, X A) + lambda |X - B|^2 over X, in coordinates where A A^T is diagonal.

    There each column of the minimum lies in the plane of the same column of N = M A^T and of B:
    the gradient is -N / (m q) + h X g / (m q^3) + 2 lambda (X - B), with q = |X A|, h = <N, X> and
    m = |M|. So X is given by two coefficients a column, (2, r), and a step costs next to nothing.
    """

    def __init__(self, N: Tensor, B: Tensor, g: Tensor, m: float) -> None:
        pair = torch.stack([N, B])
        self.inner = (pair[:, None] * pair[None]).sum(2)  # (2, 2, r): of N's and B's columns
        self.g, self.m = g, m
        unit = torch.eye(2, dtype=g.dtype)[:, :, None].expand(2, 2, len(g))
        self.N: Tensor = unit[0]
        self.B: Tensor = unit[1]

    def dot(self, X: Tensor, Y: Tensor, by: Tensor | float = 1.0) -> float:
        """Compute <X, Y>, with columns weighted."""
        return float((X[:, None] * Y * self.inner * by).sum())

    def size(self, X: Tensor) -> float:
        """Compute |X A|."""
        return math.sqrt(max(0.0, self.dot(X, X, self.g)))

    def cost(self, X: Tensor) -> float:
        """Compute what is to be the least."""
        product = self.size(X)
        cosine = self.dot(self.N, X) / (self.m * product) if product else 0.0
        return 1 - cosine + LAMBDA * self.dot(X - self.B, X - self.B)

    def minimum(self) -> Tensor:
        """Descend from B, where the least correction is, to the minimum."""
        X, cost = self.B, self.cost(self.B)
        for _ in range(_MOST_STEPS):
            following = self._step(X, cost)
            gain = cost - self.cost(following)
            if gain <= _GAIN or not self.size(following):
                break
            X, cost = following, cost - gain
        return X

    def _step(self, X: Tensor, cost: float) -> Tensor:
        """Go down, by at most the whole of a step of Newton's that leaves the length as it is."""
        product = self.size(X)
        curve = self.dot(self.N, X) / (self.m * product**3)
        slope = curve * self.g * X + 2 * LAMBDA * (X - self.B) - self.N / (self.m * product)
        step = -slope / (max(0.0, curve) * self.g + 2 * LAMBDA)
        fall = self.dot(slope, step)
        for half in range(_HALVINGS):
            length = 0.5**half
            following = self._of_best_length(X + length * step)
            if self.cost(following) <= cost + 1e-4 * length * fall:
                return following
        return X

    def _of_best_length(self, X: Tensor) -> Tensor:
        """Stretch X, which changes no cosine, to where it is nearest to B.

        If X turns away from B, that is zero, where there is no product: then X gets B's length.
        """
        along, square = self.dot(X, self.B), self.dot(X, X)
        if along > 0:
            return X * (along / square)
        longest = self.dot(self.B, self.B)
        return X * math.sqrt(longest / square) if square > longest else X


def bounded(D: Tensor, change: Tensor) -> Tensor:
    """Make D as small as the change is, if it is larger."""
    largest, size = float(change.norm()), float(D.norm())
    return D * (largest / size) if size > largest else D


METHOD = LoraFair
