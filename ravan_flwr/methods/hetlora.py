"""Train HetLoRA: a LoRA whose rank depends on each client's budget (Cho et al., 2024).

A client with a budget fraction trains the first r_c = floor(fraction * r) of the r ranks, at least
one: the server sends it B[:, :r_c] and A[:r_c]. The server pads its reply with zeros to rank r, and
weights it, layer by layer, by the norm of its delta-weight:

    S_c = |B_c A_c|_F,    p_c = S_c / sum S,    B <- sum_c p_c B_c,    A <- sum_c p_c A_c

A layer whose delta-weight is zero in every reply does not change. With `weighting=examples` p_c is
proportional to S_c times the number of examples. The mean is not exact, as in FedIT (fedit.py).
"""

from collections.abc import Mapping

from torch import Tensor
from torch.nn import functional as F

from ravan_flwr.adapters.lora import product_norm
from ravan_flwr.methods.base import Tensors
from ravan_flwr.methods.lora import RankedLora
from ravan_flwr.methods.tensors import Mean


class HetLora(RankedLora):
    """State and upload: {"B", "A"}; a client trains the first r_c ranks."""

    def open_round(self, state: Tensors) -> "NormWeighted":
        return NormWeighted(self, state)


class NormWeighted:
    """The means of the padded B and A of every layer, each reply weighted by its S_c."""

    def __init__(self, method: HetLora, state: Tensors) -> None:
        self.method = method
        Bs, As = method.split(state)
        self.Bs, self.As = [Mean(B) for B in Bs], [Mean(A) for A in As]

    def add(self, upload: Mapping[str, Tensor], weight: float) -> None:
        """Add one client's B and A, of its own rank."""
        factors = self.method.split(upload)
        for mean_B, mean_A, B, A in zip(self.Bs, self.As, *factors, strict=True):
            norm, missing = weight * product_norm(B, A), self.method.rank - len(A)
            mean_B.add(F.pad(B, (0, missing)), norm)
            mean_A.add(F.pad(A, (0, 0, 0, missing)), norm)

    def close(self) -> Tensors:
        """Return the next state."""
        return self.method.pack([B.close() for B in self.Bs], [A.close() for A in self.As])


METHOD = HetLora
