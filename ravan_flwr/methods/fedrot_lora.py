"""Train FedRot-LoRA: FedIT with the clients' factors aligned by rotations (Zhang et al., 2026).

(B R) (R^T A) = B A for every rotation R. So two clients with the same product may have factors that
cancel each other in separate averages. In odd rounds each pair is rotated towards the A of the last
state, in even rounds towards its B:

    R_c = argmin |R^T A_c - A|    or    argmin |B_c R - B|,    over rotations R
    B <- mean_c(B_c R'_c),    A <- mean_c(R'_c^T A_c)

R'_c is the rotation nearest to (1 - lambda) I + lambda R_c, a partial rotation. With lambda = 0
this is FedIT; the paper's best values are 0.4 to 0.6. The public code's default, 1.5, takes the
whole orthogonal factor, reflections included. The method is not exact. The rotation needs only the
upload and the last state, so the server computes it, after the check of the upload.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import Means

LAMBDA = 0.5
_REGULARISATION = 1e-6  # relative to a matrix's norm: far smaller directions are not rotated


class FedRotLora(LoraMethod):
    """State and upload: {"B", "A"}."""

    aligned = "A"  # the factor that is rotated towards the state's
    rounds = ({"aligned": "A"}, {"aligned": "B"})

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        """Return an upload's factors, rotated towards those of the state."""
        Bs, As = [], []
        for B, A, old_B, old_A in zip(*self.split(upload), *self.split(state), strict=True):
            B, A, old_B, old_A = (tensor.double() for tensor in (B, A, old_B, old_A))  # noqa: PLW2901
            R = partial_rotation(A @ old_A.mT if self.aligned == "A" else B.mT @ old_B, LAMBDA)
            Bs.append(B @ R)
            As.append(R.mT @ A)
        return self.pack(Bs, As)

    def open_round(self, state: Tensors) -> "AlignedMeans":
        return AlignedMeans(self, state)


class AlignedMeans(Means):
    """The means of the rotated B and A."""

    def __init__(self, method: FedRotLora, state: Tensors) -> None:
        super().__init__(state)
        self.method, self.state = method, state

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A."""
        super().add(self.method.expand_upload(upload, self.state), weight)


def partial_rotation(correlation: Tensor, fraction: float) -> Tensor:
    """Return that fraction of the rotation R which maximises trace(R^T correlation)."""
    unit = torch.eye(len(correlation), dtype=correlation.dtype)
    rotation = nearest_rotation(correlation + _REGULARISATION * correlation.norm() * unit)
    return nearest_rotation((1 - fraction) * unit + fraction * rotation)


def nearest_rotation(matrix: Tensor) -> Tensor:
    """Return the rotation nearest to a matrix; the identity for a matrix of zeros."""
    if not matrix.any():
        return torch.eye(len(matrix), dtype=matrix.dtype)
    U, _, Vh = torch.linalg.svd(matrix)
    flip = torch.ones(len(matrix), dtype=matrix.dtype)
    flip[-1] = torch.linalg.det(U @ Vh).sign()  # a reflection is no rotation
    rotation: Tensor = (U * flip) @ Vh
    return rotation


METHOD = FedRotLora
