"""Keep frozen weights in 16 bits, and compute with them as if they were kept in float32.

A weight is widened where it is used, which is exact, and again for the backward pass, so that no
copy of it is kept in between. Under autocast in its own dtype it is used as it is. So a network
whose weights fit into 16 bits, as those of most checkpoints do, computes the same bits in half the
memory. Linear layers and embeddings are kept so; normalisations, convolutions and what
`transformers` wants in float32 are small, and stay.

Autocast casts every frozen float32 weight in every step. `keep_casts` lets it do so once: the
copies in 16 bits, which a step needs anyway, stay with the weights.
"""

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class StoredLinear(nn.Linear):
    """Compute a frozen linear layer in the dtype of its input, or in autocast's."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype or autocasts(x):
            return F.linear(x, cast_once(self.weight, x), cast_once(self.bias, x))
        rows = x.reshape(-1, x.shape[-1])  # so that what comes out is no view, and may be added to
        y: Tensor = _Widened.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)


def keep_casts(network: nn.Module) -> None:
    """Let frozen linear layers, and the bases beside them, keep what autocast makes of them."""
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = StoredLinear
    frozen = [m for m in network.modules() if isinstance(m, StoredLinear)]
    tensors: list[Any] = [tensor for linear in frozen for tensor in linear.parameters()]
    for module in network.modules():
        tensors += [b for b in module.buffers(recurse=False) if hasattr(module, "A_stack")]
    for tensor in tensors:
        tensor.kept_cast = None


def cast_once(tensor: Any, x: Tensor) -> Any:
    """Give a tensor in autocast's dtype, made once if it is to be kept; else leave it as it is."""
    if tensor is None or not hasattr(tensor, "kept_cast") or tensor.requires_grad:
        return tensor
    if not autocasts(x):
        return tensor
    wanted, kept = (tensor._version, torch.get_autocast_dtype(x.device.type)), tensor.kept_cast
    if kept is None or kept[0] != wanted:
        with torch.inference_mode(False):
            kept = tensor.kept_cast = wanted, tensor.detach().to(wanted[1])
    return kept[1]


class StoredEmbedding(nn.Embedding):
    """Look numbers up in 16 bits, and give them in float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (as its base class calls it)
        return super().forward(input).float()


class StoredScaledEmbedding(StoredEmbedding):
    """Do so for an embedding that is multiplied by a number, as Gemma's."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002
        return super().forward(input) * cast(Tensor, self.embed_scale)


class _Widened(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return F.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return gy @ weight.to(gy.dtype), None, None


def keep_in(network: nn.Module, dtype: torch.dtype, apart: Collection[nn.Parameter]) -> None:
    """Keep linear layers and embeddings in that dtype, and all else, as `apart`, in float32."""
    kept: set[int] = set()
    if dtype != torch.float32:
        kept = {id(weight) for weight in _storable(network, {id(weight) for weight in apart})}
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype if id(parameter) in kept else torch.float32)
    for module in network.modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            # Loaded in 16 bits it was rounded, which no weight of the files is.
            rounded = cast(Tensor, module.embed_scale)
            module.embed_scale = torch.full_like(rounded, scale, dtype=torch.float32)
        made = _stored_class(module)
        if made is not None and id(getattr(module, "weight", None)) in kept:
            module.__class__ = made


def _storable(network: nn.Module, apart: set[int]) -> Iterator[nn.Parameter]:
    """List the weights of which every module that uses them can be kept in 16 bits."""
    whole = {id(parameter) for parameter in network.parameters()}
    held = tuple(getattr(network, "_keep_in_fp32_modules", None) or ())
    for name, module in network.named_modules():
        can = _stored_class(module) is not None
        can = can and not any(part in held for part in name.split("."))
        for parameter in module.parameters(recurse=False):
            if not can or parameter is not module.weight:
                whole.discard(id(parameter))
    for parameter in network.parameters():
        if id(parameter) in whole - apart:
            yield parameter


_STORED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StoredLinear,
    nn.Embedding: StoredEmbedding,
}


def _stored_class(module: nn.Module) -> type[nn.Module] | None:
    """Find the class that does the same with a weight of 16 bits; None if there is none."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")
    if scaled and len([*module.parameters(recurse=False)]) == 1:
        return StoredScaledEmbedding
    return _STORED.get(type(module))


def autocasts(x: Tensor) -> bool:
    """Tell whether autocast is on for the device that a tensor is on."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
