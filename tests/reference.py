"""Slow reference implementations, which the fast code must agree with."""

from collections.abc import Sequence

import torch
from torch import Tensor


def multihead_forward(
    x: Tensor, W: Tensor, bias: Tensor | None, B: Tensor, H: Tensor, A: Tensor, s: Tensor
) -> Tensor:
    """y = W x + b + sum_i s_i B_i H_i A_i x, one head and one example at a time."""
    rows = []
    for row in x.reshape(-1, x.shape[-1]):
        y = W @ row
        if bias is not None:
            y = y + bias
        for i in range(len(H)):
            y = y + s[i] * (B[i] @ (H[i] @ (A[i] @ row)))
        rows.append(y)
    return torch.stack(rows).view(*x.shape[:-1], len(W))


def multihead_delta(B: Tensor, H: Tensor, A: Tensor, s: Tensor) -> Tensor:
    """sum_i s_i B_i H_i A_i"""
    total = torch.zeros(B.shape[1], A.shape[2], dtype=B.dtype)
    for i in range(len(H)):
        total = total + s[i] * B[i] @ H[i] @ A[i]
    return total


def head_means(
    old: Tensor, uploads: Sequence[tuple[Sequence[Sequence[int]], dict[tuple[int, int], Tensor]]]
) -> Tensor:
    """Equation 7, head by head. An upload is (heads of each layer, (layer, head) -> s H)."""
    new = old.clone()
    for layer in range(old.shape[0]):
        for head in range(old.shape[1]):
            sent_heads = [upload[layer, head] for heads, upload in uploads if head in heads[layer]]
            if sent_heads:
                new[layer, head] = torch.stack([g.double() for g in sent_heads]).sum(0) / len(
                    sent_heads
                )
    return new


def weighted_mean(tensors: Sequence[Tensor], weights: Sequence[float]) -> Tensor:
    """sum_c w_c T_c / sum_c w_c, in float64."""
    total = torch.zeros_like(tensors[0], dtype=torch.float64)
    for tensor, weight in zip(tensors, weights, strict=True):
        total = total + weight * tensor.double()
    return total / sum(weights)


def hetlora_mean(factors: Sequence[tuple[Tensor, Tensor]], rank: int) -> tuple[Tensor, Tensor]:
    """One layer: pad each client's B (out, r_c), A (r_c, in) with zeros, weigh by |B A|."""
    padded = []
    for B, A in factors:
        B_c, A_c = torch.zeros(len(B), rank), torch.zeros(rank, A.shape[1])
        B_c[:, : B.shape[1]] = B
        A_c[: len(A)] = A
        padded.append((B_c.double(), A_c.double()))
    norms = [float(torch.linalg.matrix_norm(B @ A)) for B, A in padded]
    return (
        weighted_mean([B for B, _ in padded], norms),
        weighted_mean([A for _, A in padded], norms),
    )


def best_of_rank(matrix: Tensor, rank: int) -> Tensor:
    """Return the best approximation of that rank, by a full singular value decomposition."""
    U, S, Vh = torch.linalg.svd(matrix.double(), full_matrices=False)
    best: Tensor = U[:, :rank] @ S[:rank].diag() @ Vh[:rank]
    return best


def leading_part(product: Tensor, tau: float = 0.99) -> tuple[Tensor, int]:
    """FLoRIST: the sum of the fewest singular directions with tau of the energy, and their number.

    One direction after the other is added, from the eigenvectors of the product's Gram matrix.
    """
    product = product.double()
    values, vectors = torch.linalg.eigh(product.T @ product)  # ascending
    values = values.clamp(min=0)
    kept, energy = torch.zeros_like(product), 0.0
    for number in range(1, 1 + min(product.shape)):
        v = vectors[:, -number]
        kept, energy = kept + torch.outer(product @ v, v), energy + float(values[-number])
        if energy >= tau * float(values.sum()):
            break
    return kept, number
