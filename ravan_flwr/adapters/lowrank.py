"""Sums of products B A of small rank, and their singular values, without the (out, in) matrix.

A sum of products is one product of the factors side by side. Its singular value decomposition
is that of a small core: with QR decompositions B = Q R and A^T = P S, B A = Q (R S^T) P^T.
"""

import torch
from torch import Tensor


class ProductSum:
    """sum_i w_i B_i A_i in float64, exact to rounding.

    The factors grow by the rank of each product, until QR decompositions bring them back to
    the smaller side of the matrix: memory does not grow with the number of products.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        self.side = min(out_features, in_features)
        self.B = torch.zeros(out_features, 0, dtype=torch.float64)
        self.A = torch.zeros(0, in_features, dtype=torch.float64)

    def add(self, B: Tensor, A: Tensor, weight: float = 1.0) -> None:
        """One more product, B (out, r) and A (r, in)."""
        self.B = torch.cat([self.B, weight * B.double()], dim=1)
        self.A = torch.cat([self.A, A.double()])
        if len(self.A) > 2 * self.side:
            Q, core, P = self._factorised()
            if len(self.B) < self.A.shape[1]:  # keep the orthonormal factor on the smaller side
                self.B, self.A = Q, core @ P.mT
            else:
                self.B, self.A = Q @ core, P.mT

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (out, k), the k singular values, V^T (k, in); each column of U has its sign fixed."""
        Q, core, P = self._factorised()
        U, S, Vh = svd(core)
        return fix_signs(Q @ U, S, Vh @ P.mT)

    def _factorised(self) -> tuple[Tensor, Tensor, Tensor]:
        """Q (out, m) and P (in, n) with orthonormal columns, core (m, n): Q core P^T."""
        Q, R = torch.linalg.qr(self.B)
        P, S = torch.linalg.qr(self.A.mT)
        return Q, R @ S.mT, P


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """U, the singular values in falling order, V^T; each column of U has its sign fixed."""
    return fix_signs(*torch.linalg.svd(matrix, full_matrices=False))


def fix_signs(U: Tensor, S: Tensor, Vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same decomposition, with the largest entry of each column of U positive."""
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))[0]
    signs = torch.where(largest < 0, -1.0, 1.0).to(U.dtype)
    return U * signs, S, signs[:, None] * Vh


def complete_rows(V: Tensor, rows: int, random: torch.Generator) -> Tensor:
    """Orthonormal rows V (k, n), and further orthonormal rows up to `rows`, drawn at random."""
    k, n = V.shape
    drawn = torch.randn(n, rows - k, generator=random, dtype=torch.float64)
    # Twice is enough: Gram-Schmidt against V loses its digits only once.
    for _ in range(2):
        drawn = torch.linalg.qr(drawn - V.mT @ (V @ drawn))[0]
    return torch.cat([V, drawn.mT])
