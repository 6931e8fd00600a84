"""Train LoRA-FAIR: FedIT, with a correction of the mean of B (Bian et al., 2025).

The mean of the products, M = mean_c(B_c A_c), is not the product of the means. The server keeps the
mean of A. To the mean of B it adds a small D that turns the product towards M:

    D = argmin 1 - cos(M, (mean B + D) mean A) + lambda |D|^2
    B <- mean B + D,    A <- mean A

The penalty is squared as implementations have it; digests of the paper print lambda |D|.

The result is not exact: M has a larger rank than A, and a cosine ignores lengths. In each layer |D|
is at most the norm of mean B's change in this round. So no reply can use the correction to move B
further than that. With one client a round D = 0, and LoRA-FAIR is FedIT.
"""

import math

import torch
from torch import Tensor

from ravan_flwr.adapters.lora import ProductSum, product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import CoMoments, LoraMethod

LAMBDA = 0.01
_MAX_STEPS = 200
_MAX_HALVINGS = 40
_MIN_GAIN = 1e-14  # decrease of the cost by a step, at or below which the descent ends


class LoraFair(LoraMethod):
    """State and upload: {"B", "A"}."""

    def open_round(self, state: Tensors) -> "CorrectedMeans":
        return CorrectedMeans(self, state)


class CorrectedMeans(CoMoments):
    """The means of B and A, with that of B corrected."""

    def close(self) -> Tensors:
        """Return the next state."""
        if self.count < 2:  # the product of the means is exact
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
    """Return D, (out, r), for M = B A + moment / weight."""
    lost, size = _residual_terms(moment, A, weight)
    gram = A @ A.mT
    product = float((B.mT @ B * gram).sum())
    norm = math.sqrt(max(0.0, product + 2 * float((B * lost).sum()) + size**2))
    sides, axes = torch.linalg.eigh(gram)
    target, mean = (B @ gram + lost) @ axes, B @ axes
    plane = Plane(target, mean, sides.clamp(min=0), norm)
    if not (norm and plane.size(plane.B)):  # the cosine is undefined
        return torch.zeros_like(B)
    minimum = plane.minimum()
    corrected: Tensor = (minimum[0] * target + minimum[1] * mean) @ axes.mT
    return corrected - B


def _residual_terms(moment: ProductSum, A: Tensor, weight: float) -> tuple[Tensor, float]:
    """Return R A^T and |R| of the residual R = moment / weight."""
    if moment.dense_sum is not None:
        residual = moment.dense() / weight
        return residual @ A.mT, float(residual.norm())
    left, right = moment.factors()
    return left @ (right @ A.mT) / weight, product_norm(left, right) / weight


class Plane:
    """Minimise 1 - cos(M, X A) + lambda |X - B|^2 over X, in coordinates where A A^T is diagonal.

    With g the diagonal of A A^T, N = M A^T, m = |M|, q = |X A| and h = <N, X>, the gradient is
    -N / (m q) + h X g / (m q^3) + 2 lambda (X - B). So each column of the minimum is in the plane
    of the same columns of N and B. X is given by its two coefficients for each column, (2, r), and
    a step needs no matrix of the layer's size.
    """

    def __init__(self, N: Tensor, B: Tensor, g: Tensor, m: float) -> None:
        pair = torch.stack([N, B])
        self.inner = (pair[:, None] * pair[None]).sum(2)  # (2, 2, r): Gram matrices of the columns
        self.g, self.m = g, m
        unit = torch.eye(2, dtype=g.dtype)[:, :, None].expand(2, 2, len(g))
        self.N: Tensor = unit[0]
        self.B: Tensor = unit[1]

    def dot(self, X: Tensor, Y: Tensor, by: Tensor | float = 1.0) -> float:
        """Return <X, Y>, with columns weighted by `by`."""
        return float((X[:, None] * Y * self.inner * by).sum())

    def size(self, X: Tensor) -> float:
        """Return |X A|."""
        return math.sqrt(max(0.0, self.dot(X, X, self.g)))

    def cost(self, X: Tensor) -> float:
        """Return the cost to minimise."""
        product = self.size(X)
        cosine = self.dot(self.N, X) / (self.m * product) if product else 0.0
        return 1 - cosine + LAMBDA * self.dot(X - self.B, X - self.B)

    def minimum(self) -> Tensor:
        """Descend from X = B, where the correction is zero, to the minimum."""
        X, cost = self.B, self.cost(self.B)
        for _ in range(_MAX_STEPS):
            candidate = self._step(X, cost)
            gain = cost - self.cost(candidate)
            if gain <= _MIN_GAIN or not self.size(candidate):
                break
            X, cost = candidate, cost - gain
        return X

    def _step(self, X: Tensor, cost: float) -> Tensor:
        """Return X after a Newton step at constant |X A|, halved until the cost falls enough."""
        product = self.size(X)
        curve = self.dot(self.N, X) / (self.m * product**3)
        gradient = curve * self.g * X + 2 * LAMBDA * (X - self.B) - self.N / (self.m * product)
        step = -gradient / (max(0.0, curve) * self.g + 2 * LAMBDA)
        descent = self.dot(gradient, step)
        for half in range(_MAX_HALVINGS):
            length = 0.5**half
            candidate = self._of_best_length(X + length * step)
            if self.cost(candidate) <= cost + 1e-4 * length * descent:
                return candidate
        return X

    def _of_best_length(self, X: Tensor) -> Tensor:
        """Return the multiple of X that is nearest to B; scaling does not change the cosine.

        If <X, B> <= 0 that would be zero, which has no cosine. Then X is shortened to B's length.
        """
        along, square = self.dot(X, self.B), self.dot(X, X)
        if along > 0:
            return X * (along / square)
        longest = self.dot(self.B, self.B)
        return X * math.sqrt(longest / square) if square > longest else X


def bounded(D: Tensor, change: Tensor) -> Tensor:
    """Return D, scaled down to the norm of the change if it is larger."""
    largest, size = float(change.norm()), float(D.norm())
    return D * (largest / size) if size > largest else D


METHOD = LoraFair
