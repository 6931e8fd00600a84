"""Share what methods whose adapters are multi-head layers have in common."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.methods.base import Method
from ravan_flwr.methods.tensors import check_names, check_tensor, probe


class MultiHeadMethod(Method[MultiHeadLinear]):
    """Adapt every layer by cores between frozen bases."""

    init = "normal"  # how the bases are made that clients make from the seed
    trains_scales = False

    def delta_weights(self, adapters: Sequence[MultiHeadLinear]) -> list[Tensor]:
        return [adapter.delta_weight().detach() for adapter in adapters]

    def fingerprint(self, adapters: Sequence[MultiHeadLinear]) -> list[float]:
        return probe([(adapter.B, adapter.A) for adapter in adapters])


def load_bases(adapters: Sequence[MultiHeadLinear], fixed: Mapping[str, Tensor]) -> None:
    """Give every layer its bases out of the flat tensors {"B", "A"}, layer after layer."""
    check_names(fixed, ["B", "A"])
    Bs = _parts(fixed, "B", [adapter.B for adapter in adapters])
    As = _parts(fixed, "A", [adapter.A for adapter in adapters])
    for adapter, B, A in zip(adapters, Bs, As, strict=True):
        adapter.set_bases(B, A)


def _parts(fixed: Mapping[str, Tensor], name: str, bases: Sequence[Tensor]) -> list[Tensor]:
    """Cut a flat tensor into the shapes of these bases."""
    sizes = [basis.numel() for basis in bases]
    flat = check_tensor(fixed, name, [sum(sizes)], torch.float32)
    return [part.view(basis.shape) for part, basis in zip(flat.split(sizes), bases, strict=True)]
