"""Keep frozen weights in 16 bits, computed with as if in float32, or in 8 or 4 bits.

Of 16 bits, a weight is widened where it is used, which is exact, and again for the backward pass,
so that no copy of it is kept in between. Under autocast in its own dtype it is used as it is. So a
network whose weights fit into 16 bits, as those of most checkpoints do, computes the same bits in
half the memory. Linear layers and embeddings are kept so; normalisations, convolutions and what
`transformers` wants in float32 are small, and stay.

Autocast casts every frozen float32 weight in every step. `keep_casts` lets it do so once: the
copies in 16 bits, which a step needs anyway, stay with the weights.

In 8 or 4 bits they are kept by bitsandbytes, as QLoRA (Dettmers et al., 2023). Every linear layer
but the classifier and the language-model head is replaced by one that keeps its weight in few bits
and computes in the precision of the run. Adapters stay in float32."""

import copy
from collections.abc import Collection
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
    key, cached = (tensor._version, torch.get_autocast_dtype(x.device.type)), tensor.kept_cast
    if cached is None or cached[0] != key:
        with torch.inference_mode(False):
            cached = tensor.kept_cast = key, tensor.detach().to(key[1])
    return cached[1]


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


def keep_in(network: nn.Module, dtype: torch.dtype, classifier: Collection[nn.Parameter]) -> None:
    """Keep linear layers and embeddings in that dtype, all else, as `classifier`, in float32."""
    ids = set[int]() if dtype == torch.float32 else _storable(network, classifier)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype if id(parameter) in ids else torch.float32)
    for module in network.modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            # Loaded in 16 bits it was rounded, which no weight of the files is.
            rounded = cast(Tensor, module.embed_scale)
            module.embed_scale = torch.full_like(rounded, scale, dtype=torch.float32)
        made = _stored_class(module)
        if made is not None and id(getattr(module, "weight", None)) in ids:
            module.__class__ = made


def _storable(network: nn.Module, classifier: Collection[nn.Parameter]) -> set[int]:
    """Find the weights of which every module that uses them can be kept in 16 bits."""
    ids = {id(weight) for weight in network.parameters()} - {id(weight) for weight in classifier}
    fp32_modules = tuple(getattr(network, "_keep_in_fp32_modules", None) or ())
    for name, module in network.named_modules():
        can = _stored_class(module) is not None
        can = can and not any(part in fp32_modules for part in name.split("."))
        for parameter in module.parameters(recurse=False):
            if not can or parameter is not module.weight:
                ids.discard(id(parameter))
    return ids


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


BITS = {"8bit": 8.0, "4bit": 4.127}  # a weight with its share of the scales


def quantize(
    network: nn.Module, how: str, classifier: Collection[nn.Parameter],
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> None:  # fmt: skip
    """Replace the linear layers, one by one onto the device; they compute in `dtype`."""
    try:
        import bitsandbytes  # noqa: PLC0415 (an extra that few need)
    except ImportError as error:
        raise ValueError(
            f"quantize: bitsandbytes cannot be imported ({error}); install it, "
            "pip install 'ravan-flwr[quantize]', or set backbone-dtype=float32"
        ) from None
    for name, linear in quantizable(network, classifier).items():
        to = linear.weight.device if device is None else device
        network.set_submodule(name, _replacement(bitsandbytes, how, linear, dtype, to))


def quantizable(network: nn.Module, classifier: Collection[nn.Parameter]) -> dict[str, nn.Linear]:
    """Find the linear layers that are frozen whatever the method, by name."""
    ids = {id(parameter) for parameter in classifier}
    head = getattr(network, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in ids
    }


def _replacement(
    library: Any, how: str, linear: nn.Linear, dtype: torch.dtype, device: torch.device
) -> nn.Module:
    sides = linear.in_features, linear.out_features
    weight = linear.weight.detach().float().cpu()  # which may be kept in 16 bits
    if how == "4bit":
        small = library.nn.Linear4bit(
            *sides,
            bias=linear.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        # On some CPUs it would pack its weights anew for evaluation, in a form that does not train.
        small.support_avx512bf16_for_cpu = False
        small.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        small = library.nn.Linear8bitLt(
            *sides, bias=linear.bias is not None, has_fp16_weights=False, device="meta"
        )
        small.weight = library.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False)
    if linear.bias is not None:
        small.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    small.weight_norm = float(weight.norm())
    small = small.to(device)
    if how == "4bit":  # unpacked as what it is computed with, which float32 is rounded to anyway
        small.weight.quant_state.dtype = dtype
    return cast(nn.Module, small)


def weight_norm(linear: nn.Linear) -> float:
    """Measure the weight's norm, from before it was quantised if it was: its bits are packed."""
    norm = getattr(linear, "weight_norm", None)
    return float(dense_weight(linear).float().norm()) if norm is None else cast(float, norm)


def dense_weight(layer: nn.Module) -> Tensor:
    """Return a layer's weight in floating point: what it computes of the unit vectors, if packed.

    bitsandbytes has more than one packing, and changes it between training and evaluation.
    """
    module: Any = layer
    weight: Tensor = module.weight
    if weight.is_floating_point():
        return weight.detach()
    dtype = torch.float16 if hasattr(module, "state") else torch.float32
    unit = torch.eye(module.in_features, dtype=dtype, device=weight.device)
    bias, module.bias = module.bias, None  # added and subtracted, it would cost bits of the weight
    try:
        with torch.no_grad():
            return cast(Tensor, module(unit).mT.float())
    finally:
        module.bias = bias


def requantize(layer: nn.Module, weight: Tensor) -> None:
    """Give a layer of few bits another weight, (out, in)."""
    module: Any = layer
    old = module.weight
    if hasattr(module, "state"):  # of 8 bits
        new = type(old)(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        module.state = copy.copy(module.state)
        module.state.reset_grads()
    else:
        new = type(old)(
            weight.cpu(),
            requires_grad=False,
            compress_statistics=old.compress_statistics,
            quant_type=old.quant_type,
            blocksize=old.blocksize,
            quant_storage=old.quant_storage,
        )
    module.weight = new.to(old.device)
