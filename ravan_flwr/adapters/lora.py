"""Adapt a linear layer by a LoRA: y = W x + b + scale B A x (Hu et al., 2022).

W and b are frozen; B (out, r) and A (r, in) are trained, or one of them. `scale` is LoRA's
alpha / r as one number, so that its meaning does not depend on the rank.

Several clients can be computed in one pass (training/together.py). B and A are then those of all
clients, (clients * out, r) and (clients * r, in).

`ProductSum` sums products B A and decomposes the sum, without the (out, in) matrix while the rank
is small. A sum of products is one product: the B side by side, times the A stacked. Its singular
value decomposition follows from that of a small core: with QR decompositions B = Q R and A^T = P S,
B A = Q (R S^T) P^T."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ravan_flwr.adapters.stored import StoredLinear


class LoRALinear(nn.Module):
    """A frozen linear layer plus a product of small rank."""

    def __init__(self, base: nn.Linear, B: Tensor, A: Tensor, scale: float = 1.0) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.scale = scale
        self.set_factors(B, A)

    def set_factors(self, B: Tensor, A: Tensor) -> None:
        """Load copies of B (out, r) and A (r, in), of any rank, and make both trainable."""
        device = self.base.weight.device
        self.B = nn.Parameter(B.detach().to(device, copy=True))
        self.A = nn.Parameter(A.detach().to(device, copy=True))

    def forward(self, x: Tensor) -> Tensor:
        clients = len(self.B) // self.base.out_features
        if clients > 1:
            y: Tensor = self.base(x)
            return y + self._of_clients(x, clients).to(y.dtype)
        u = F.linear(x, self.A)
        y = self.base(x)
        plain = type(self.base) in (nn.Linear, StoredLinear)
        if plain and u.dtype == y.dtype == self.B.dtype:
            # In place: no tensor for the product, and no separate pass for the sum.
            flat = y.view(-1, y.shape[-1]).addmm_(
                u.view(-1, u.shape[-1]), self.B.mT, alpha=self.scale
            )
            return flat.view(y.shape)
        return y + F.linear(u if self.scale == 1 else self.scale * u, self.B)

    def _of_clients(self, x: Tensor, clients: int) -> Tensor:
        """Return scale B A x with the factors of each client, whose examples are in order."""
        A, B = self.A.view(clients, -1, x.shape[-1]), self.B.view(clients, -1, self.B.shape[-1])
        u = torch.bmm(x.reshape(clients, -1, x.shape[-1]).to(A.dtype), A.mT)
        return torch.bmm(u, self.scale * B.mT).view(*x.shape[:-1], -1)

    def delta_weight(self) -> Tensor:
        """Return scale B A, (out, in)."""
        return self.scale * self.B @ self.A

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return two factors whose product is the delta-weight, scale included."""
        with torch.no_grad():
            return self.scale * self.B, self.A.detach()


class ProductSum:
    """The sum of w_i B_i A_i in float64, exact up to rounding.

    The sum is kept as factors until their rank exceeds the smaller side of the matrix. Then they
    are added to the matrix as a product, so that memory does not grow with the number of products.
    """

    def __init__(self, out_features: int, in_features: int) -> None:
        self.side = min(out_features, in_features)
        self.dense_sum: Tensor | None = None
        self._Bs = [torch.zeros(out_features, 0, dtype=torch.float64)]
        self._As = [torch.zeros(0, in_features, dtype=torch.float64)]

    def add(self, B: Tensor, A: Tensor, weight: float = 1.0) -> None:
        """Add weight * B A, with B (out, r) and A (r, in)."""
        self._Bs.append(weight * B.double())
        self._As.append(A.double())
        if sum(map(len, self._As)) > self.side:
            self.dense()

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return B (out, k) and A (k, in) of the products that are not yet in the matrix."""
        return torch.cat(self._Bs, dim=1), torch.cat(self._As)

    def dense(self) -> Tensor:
        """Return the matrix (out, in) of all products; it replaces the factors."""
        B, A = self.factors()
        self.dense_sum = B @ A if self.dense_sum is None else self.dense_sum.addmm_(B, A)
        del self._Bs[1:], self._As[1:]
        return self.dense_sum

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return U (out, k), k singular values and V^T (k, in), with signs by `fix_signs`."""
        if self.dense_sum is not None:
            return svd(self.dense())
        B, A = self.factors()
        Q, R = torch.linalg.qr(B)
        P, S = torch.linalg.qr(A.mT)
        U, values, Vh = svd(R @ S.mT)
        return fix_signs(Q @ U, values, Vh @ P.mT)


def product_norm(B: Tensor, A: Tensor) -> float:
    """Return |B A|_F from two (r, r) matrices: |B A|^2 = sum((B^T B) * (A A^T))."""
    B, A = B.double(), A.double()
    return float(((B.mT @ B) * (A @ A.mT)).sum().clamp(min=0).sqrt())


def svd(matrix: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return U, the singular values in descending order and V^T, with signs by `fix_signs`."""
    return fix_signs(*torch.linalg.svd(matrix, full_matrices=False))


def fix_signs(U: Tensor, S: Tensor, Vh: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the same decomposition, with the largest entry of each column of U positive."""
    largest = U.gather(0, U.abs().argmax(0, keepdim=True))[0]
    signs = torch.where(largest < 0, -1.0, 1.0).to(U.dtype)
    return U * signs, S, signs[:, None] * Vh


def complete_rows(V: Tensor, rows: int, random: torch.Generator) -> Tensor:
    """Return the orthonormal rows V (k, n) with random orthonormal rows appended, `rows` in all."""
    k, n = V.shape
    basis = torch.randn(n, rows - k, generator=random, dtype=torch.float64)
    # Twice is enough: the second pass restores the orthogonality that rounding cost in the first.
    for _ in range(2):
        basis = torch.linalg.qr(basis - V.mT @ (V @ basis))[0]
    return torch.cat([V, basis.mT])
