"""Train FedRot-LoRA: FedIT of factors that are turned to one another first (Zhang et al., 2026).

(B R) (R^T A) is B A for every rotation R: two clients may mean the same and still cancel out where
B and A are averaged apart. So each pair is turned towards the A of the last state in odd rounds,
and towards its B in even ones:

    R = argmin |R^T A_c - A|    or    argmin |B_c R - B|,    over rotations R
    B <- mean_c(B_c R'_c),    A <- mean_c(R'_c^T A_c)

R' is the rotation nearest to (1 - lambda) I + lambda R: it goes a part of the way. With lambda = 0
this is FedIT; the paper's best values are 0.4 to 0.6. The public code's default, 1.5, takes the
whole orthogonal factor, reflections included. It is not exact. The turn needs the upload and the
last state alone, so the server makes it, after a reply was checked as the client trained it.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import LoraMethod
from ravan_flwr.methods.tensors import Means

LAMBDA = 0.5
_NOTHING = 1e-6  # of a matrix's norm: directions below it are left unturned


class FedRotLora(LoraMethod):
    """Keep the state {"B", "A"}; an upload is the same."""

    aligned = "A"  # the factor that is turned to that of the state
    rounds = ({"aligned": "A"}, {"aligned": "B"})

    def expand_upload(self, upload: Mapping[str, Tensor], state: Tensors) -> Tensors:
        """Turn an upload's factors towards those of the state."""
        Bs, As = [], []
        for B, A, old_B, old_A in zip(*self.split(upload), *self.split(state), strict=True):
            B, A, old_B, old_A = (tensor.double() for tensor in (B, A, old_B, old_A))  # noqa: PLW2901
            R = towards(A @ old_A.mT if self.aligned == "A" else B.mT @ old_B, LAMBDA)
            Bs.append(B @ R)
            As.append(R.mT @ A)
        return self.pack(Bs, As)

    def open_round(self, state: Tensors) -> "TurnedMeans":
        return TurnedMeans(self, state)


class TurnedMeans(Means):
    """Keep the means of B and A, turned."""

    def __init__(self, method: FedRotLora, state: Tensors) -> None:
        super().__init__(state)
        self.method, self.state = method, state

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A."""
        super().add(self.method.expand_upload(upload, self.state), weight)


def towards(correlation: Tensor, part: float) -> Tensor:
    """Find the rotation with the largest trace(R^T correlation), and go that part of the way."""
    unit = torch.eye(len(correlation), dtype=correlation.dtype)
    rotation = nearest(correlation + _NOTHING * correlation.norm() * unit)
    return nearest((1 - part) * unit + part * rotation)


def nearest(matrix: Tensor) -> Tensor:
    """Find the rotation nearest to a matrix; to a matrix of zeros, the one that turns nothing."""
    if not matrix.any():
        return torch.eye(len(matrix), dtype=matrix.dtype)
    U, _, Vh = torch.linalg.svd(matrix)
    flip = torch.ones(len(matrix), dtype=matrix.dtype)
    flip[-1] = torch.linalg.det(U @ Vh).sign()  # a reflection is no rotation
    rotation: Tensor = (U * flip) @ Vh
    return rotation


METHOD = FedRotLora
