"""Compute the leading singular subspaces of a gradient from linear sketches, for RAVAN's bases.

Let G = dL/dW (out, in) be a client's gradient of an adapted matrix. It uploads

    Y = G Omega   (out, k)      and      Z = Psi G   (l, in)

with Omega and Psi drawn from the seed on both sides. Both sketches are linear in G, so the sum of
the clients' sketches is exactly the sketch of the sum of their gradients. No full gradient is sent.
From the sum the server computes G ~ Q (Psi Q)^+ Z, with Q an orthonormal basis of Y's columns
(Tropp et al., "Practical sketching algorithms for low-rank matrix approximation", 2017), and from
that the leading singular vectors.

The first heads take the singular vectors in order, r each. The other heads are filled with an
orthonormal complement, so that all heads are orthogonal, as with Gram-Schmidt.
"""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ravan_flwr.adapters.attach import Layer
from ravan_flwr.adapters.multihead import MultiHeadLinear
from ravan_flwr.seeding import generator

OVERSAMPLING = 8  # columns of Y beyond the wanted dimensions


@contextmanager
def watch_gradients(
    layer: MultiHeadLinear, on_gradient: Callable[[Tensor, Tensor], None]
) -> Iterator[None]:
    """Call `on_gradient(x, dL/dy)`, both (tokens, features), in every backward pass of a layer.

    No head is trained within the context. Only x is kept, which the layers of a block share, and no
    activation of the heads. So a backward pass needs less memory than one that trains all heads
    (benchmarks/ravan_memory.py).
    """
    # No parameter is trainable here, so a zero that requires a gradient starts the graph.
    zero = torch.zeros((), device=layer.H.device, requires_grad=True)

    def watch(_: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
        x = inputs[0].detach().flatten(0, -2)
        output = output + zero.to(output.dtype)
        dtype = layer.H.dtype
        output.register_hook(lambda gy: on_gradient(x.to(dtype), gy.flatten(0, -2).to(dtype)))
        return output

    layer.train_heads([])
    handle = layer.register_forward_hook(watch)
    try:
        yield
    finally:
        handle.remove()
        layer.train_all_heads()


@dataclass(frozen=True)
class Sketcher:
    """The sizes and test matrices of the sketches of one layer's gradient."""

    layer: Layer
    dimensions: int  # number of leading singular vectors
    seed: int

    @property
    def k(self) -> int:
        """Return the number of columns of Y."""
        return min(self.dimensions + OVERSAMPLING, self.layer.in_features, self.layer.out_features)

    @property
    def l(self) -> int:  # noqa: E743 (the paper's name)
        """Return the number of rows of Z: more than k, so that Psi Q is well conditioned."""
        return min(2 * self.k + 1, self.layer.out_features)

    @property
    def size(self) -> int:
        """Return the number of entries that a client sends for this layer."""
        return self.layer.out_features * self.k + self.l * self.layer.in_features

    def test_matrices(self) -> tuple[Tensor, Tensor]:
        """Draw Omega (in, k) and Psi (l, out), float32, a function of (seed, layer)."""
        random = generator(self.seed, "sketch", self.layer.name)
        shapes = (self.layer.in_features, self.k), (self.l, self.layer.out_features)
        Omega, Psi = (torch.randn(s, generator=random, dtype=torch.float64) for s in shapes)
        return (Omega / math.sqrt(self.k)).float(), (Psi / math.sqrt(self.l)).float()

    def subspaces(self, flat: Tensor) -> tuple[Tensor, Tensor]:
        """Return the leading left (out, dimensions) and right (in, dimensions) singular vectors."""
        split = self.layer.out_features * self.k
        Y = flat[:split].view(self.layer.out_features, self.k).double()
        Z = flat[split:].view(self.l, self.layer.in_features).double()
        Q = torch.linalg.qr(Y).Q
        X = torch.linalg.pinv(self.test_matrices()[1].double() @ Q) @ Z  # (k, in): G ~ Q X
        U, _, Vh = torch.linalg.svd(X, full_matrices=False)
        return Q @ U[:, : self.dimensions], Vh[: self.dimensions].T


class GradientSketch:
    """The sums of a layer's two sketches over backward passes."""

    def __init__(self, sketcher: Sketcher, device: torch.device) -> None:
        self.Omega, self.Psi = (matrix.to(device) for matrix in sketcher.test_matrices())
        self.Y = torch.zeros(sketcher.layer.out_features, sketcher.k, device=device)
        self.Z = torch.zeros(sketcher.l, sketcher.layer.in_features, device=device)

    def add(self, x: Tensor, gy: Tensor) -> None:
        """Add G Omega and Psi G for G = gy^T x, without making G."""
        self.Y += gy.T @ (x @ self.Omega)
        self.Z += (self.Psi @ gy.T) @ x

    def flat(self) -> Tensor:
        """Return both sketches as one vector."""
        return torch.cat([self.Y.flatten(), self.Z.flatten()]).cpu()


def fill_heads(leading: Tensor, heads: int, rank: int, random: torch.Generator) -> Tensor:
    """Return (heads, side, rank): the leading columns first, then an orthonormal complement.

    If the side has no room for all heads, further heads start a new orthonormal block.
    """
    side, columns = leading.shape
    fit = min(side // rank, heads)
    noise = torch.randn(side, fit * rank - columns, generator=random, dtype=torch.float64)
    basis = noise - leading @ (leading.T @ noise)
    basis = torch.linalg.qr(basis - leading @ (leading.T @ basis)).Q  # twice is enough
    block = torch.cat([leading, basis], 1).reshape(side, fit, rank).transpose(0, 1)
    if fit == heads:
        return block
    return torch.cat([block, fill_heads(leading[:, :0], heads - fit, rank, random)])
