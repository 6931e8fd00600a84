"""What the methods whose adapters are multi-head layers have in common."""

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from ravan_flwr.adapters import MultiHeadLinear
from ravan_flwr.methods.tensors import check_names, check_tensor, probe


def multiheads(adapters: Sequence[nn.Module]) -> list[MultiHeadLinear]:
    """The same modules, as what they are."""
    return [cast(MultiHeadLinear, adapter) for adapter in adapters]


def load_bases(adapters: Sequence[nn.Module], fixed: Mapping[str, Tensor]) -> None:
    """Give every layer its bases out of the flat tensors {"B", "A"}, layer after layer."""
    layers = multiheads(adapters)
    check_names(fixed, ["B", "A"])
    parts = {}
    for name, bases in (("B", [a.B for a in layers]), ("A", [a.A for a in layers])):
        sizes = [basis.numel() for basis in bases]
        flat = check_tensor(fixed, name, [sum(sizes)], torch.float32)
        pairs = zip(flat.split(sizes), bases, strict=True)
        parts[name] = [part.view(basis.shape) for part, basis in pairs]
    for layer, B, A in zip(layers, parts["B"], parts["A"], strict=True):
        layer.set_bases(B, A)


def fingerprint_of_bases(adapters: Sequence[nn.Module]) -> list[float]:
    """Numbers that agree where the bases do."""
    return probe([(layer.B, layer.A) for layer in multiheads(adapters)])
