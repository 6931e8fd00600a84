"""Sum products B A and find their singular values; while the rank is small, without the matrix.

A sum of products is one product of the factors side by side. Its singular value decomposition
is that of a small core: with QR decompositions B = Q R and A^T = P S, B A = Q (R S^T) P^T.
"""

import torch
from torch import Tensor


class ProductSum:
    """Sum w_i B_i A_i in float64, exact to rounding.

    The factors are kept until they would have more columns than the matrix has. Then the matrix is
    smaller than they are, and takes them in: memory does not grow with the number of products.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        self.side = min(out_features, in_features)
        self.folded: Tensor | None = None
        self._Bs = [torch.zeros(out_features, 0, dtype=torch.float64)]
        self._As = [torch.zeros(0, in_features, dtype=torch.float64)]

    def add(self, B: Tensor, A: Tensor, weight: float = 1.0) -> None:
        """Add one more product, B (out, r) and A (r, in)."""
        self._Bs.append(weight * B.double())
        self._As.append(A.double())
        if sum(map(len, self._As)) > self.side:
            self.dense()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Give B (out, k) and A (k, in) of those products that the matrix has not taken in."""
        return torch.cat(self._Bs, dim=1), torch.cat(self._As)

    def dense(self) -> Tensor:
        """Make the matrix of all of them, (out, in), which takes in those that are left."""
        B, A = self.factors()
        self.folded = B @ A if self.folded is None else self.folded.addmm_(B, A)
        del self._Bs[1:], self._As[1:]
        return self.folded

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Find U (out, k), k singular values, V^T (k, in); each column of U has its sign fixed."""
        if self.folded is not None:
            return svd(self.dense())
        B, A = self.factors()
        Q, R = torch.linalg.qr(B)
        P, S = torch.linalg.qr(A.mT)
        U, values, Vh = svd(R @ S.mT)
        return fix_signs(Q @ U, values, Vh @ P.mT)


def product_norm(B: Tensor, A: Tensor) -> float:
    """Compute |B A|_F from two (r, r) matrices: |B A|^2 = sum((B^T B) * (A A^T))."""
    B, A = B.double(), A.double()
    return float(((B.mT @ B) * (A @ A.mT)).sum().clamp(min=0).sqrt())


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Find U, the singular values in falling order, V^T; each column of U has its sign fixed."""
    return fix_signs(*torch.linalg.svd(matrix, full_matrices=False))


def fix_signs(U: Tensor, S: Tensor, Vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Make the largest entry of each column of U positive; the decomposition is the same."""
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))[0]
    signs = torch.where(largest < 0, -1.0, 1.0).to(U.dtype)
    return U * signs, S, signs[:, None] * Vh


def complete_rows(V: Tensor, rows: int, random: torch.Generator) -> Tensor:
    """Complete the orthonormal rows V (k, n) by others, drawn at random, up to `rows`."""
    k, n = V.shape
    drawn = torch.randn(n, rows - k, generator=random, dtype=torch.float64)
    # Twice is enough: Gram-Schmidt against V loses its digits only once.
    for _ in range(2):
        drawn = torch.linalg.qr(drawn - V.mT @ (V @ drawn))[0]
    return torch.cat([V, drawn.mT])
