"""Store frozen weights in 16 bits but compute as in float32, or quantise them to 8 or 4 bits.

A weight of 16 bits is widened where it is used, which is exact. It is widened again for the
backward pass, so that no copy is kept in between. Under autocast in its own dtype it is used
unchanged. So a network whose weights fit into 16 bits, as those of most checkpoints, computes the
same bits in half the memory. This applies to linear layers and embeddings. Normalisations,
convolutions and the modules that `transformers` requires in float32 are small, and stay in float32.

Autocast casts every frozen float32 weight in every step. After `keep_casts` it does so once: the
copies in 16 bits, which a step needs anyway, are cached beside the weights. A GPU multiplies
matrices fastest whose sides are multiples of 8, so the copies of the bases have zeros up to one.

Autocast computes normalisations in float32, and widens what they are given, so that each block of a
transformer casts the residual stream six times. After `narrow` it stays in 16 bits, and sums inside
a normalisation have 32.

bitsandbytes stores weights in 8 or 4 bits, as in QLoRA (Dettmers et al., 2023). Every linear layer
except the classifier and the language-model head is replaced by a quantised one, which computes in
the precision of the run. Adapters stay in float32."""

import copy
from collections.abc import Collection
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F


class StoredLinear(nn.Linear):
    """A frozen linear layer that computes in the dtype of its input, or in autocast's."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == self.weight.dtype or autocasts(x):
            return F.linear(x, cast_once(self.weight, x), cast_once(self.bias, x))
        rows = x.reshape(-1, x.shape[-1])  # so that the output is no view, and in-place sums work
        y: Tensor = _Widened.apply(rows, self.weight, self.bias)  # type: ignore[no-untyped-call]
        return y.view(*x.shape[:-1], -1)


def keep_casts(network: nn.Module, multiple: int = 1) -> None:
    """Cache autocast's copies of the frozen linear layers' weights, and of the adapters' bases.

    The rank of the bases' copies is a multiple of this number, by zeros.
    """
    for module in network.modules():
        if type(module) is nn.Linear:
            module.__class__ = StoredLinear
    frozen = [m for m in network.modules() if isinstance(m, StoredLinear)]
    tensors: list[Any] = [tensor for linear in frozen for tensor in linear.parameters()]
    for module in network.modules():
        if hasattr(module, "A_stack"):
            heads: Any = module
            for base, rows in ((heads.A_stack, True), (heads.B_stack, False)):
                tensors.append(base)
                base.padding = Padding(heads.rank, -heads.rank % multiple, rows)
    for tensor in tensors:
        tensor.kept_cast = None


class Padding(NamedTuple):
    """Zeros that follow the rank of each head in a stack of bases, in its rows or columns."""

    rank: int
    zeros: int
    rows: bool

    def padded(self, stack: Tensor) -> Tensor:
        """Return the stack with the zeros."""
        if self.rows:
            return F.pad(stack.unflatten(0, (-1, self.rank)), (0, 0, 0, self.zeros)).flatten(0, 1)
        return F.pad(stack.unflatten(1, (-1, self.rank)), (0, self.zeros)).flatten(1)


def cast_once(tensor: Any, x: Tensor) -> Any:
    """Return the tensor's cached copy in autocast's dtype; the tensor if it has no cache."""
    if tensor is None or not hasattr(tensor, "kept_cast") or tensor.requires_grad:
        return tensor
    if not autocasts(x):
        return tensor
    key, cached = (tensor._version, torch.get_autocast_dtype(x.device.type)), tensor.kept_cast
    if cached is None or cached[0] != key:
        with torch.inference_mode(False):
            cached = tensor.kept_cast = key, _for_cast(tensor).to(key[1])
    return cached[1]


def refresh_cast(tensor: Any, dtype: torch.dtype, cast: Tensor) -> None:
    """Let a tensor's cached copy be this one, at its address, with the tensor's present values."""
    kept = (tensor._version, dtype), cast
    if (
        tensor.kept_cast is None
        or tensor.kept_cast[0] != kept[0]
        or tensor.kept_cast[1] is not cast
    ):
        cast.copy_(_for_cast(tensor))
        tensor.kept_cast = kept


def _for_cast(tensor: Any) -> Tensor:
    padding: Padding | None = getattr(tensor, "padding", None)
    detached: Tensor = tensor.detach()
    return padding.padded(detached) if padding is not None and padding.zeros else detached


def narrow(network: nn.Module, dtype: torch.dtype, classifier: Collection[nn.Parameter]) -> None:
    """Let a frozen network compute its residual stream in that dtype under autocast.

    Networks with modules that transformers keeps in float32 are left as they are.
    """
    if getattr(network, "_keep_in_fp32_modules", None):
        return
    ids = {id(parameter) for parameter in classifier}
    for module in network.modules():
        own = [*module.parameters(recurse=False)]
        if isinstance(module, _NORMS_IN_FLOAT32) or any(id(parameter) in ids for parameter in own):
            continue
        for parameter in own:
            parameter.data = parameter.data.to(dtype)
        if type(module) in _NARROW:
            module.__class__ = _NARROW[type(module)]


class NarrowLayerNorm(nn.LayerNorm):
    """A frozen normalisation that returns the dtype of its weight under autocast, too."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = x.dtype if self.weight is None else self.weight.dtype
        with torch.autocast(x.device.type, enabled=False):
            return F.layer_norm(
                x.to(dtype), self.normalized_shape, self.weight, self.bias, self.eps
            )


# Their kernels take statistics and weights in float32.
_NORMS_IN_FLOAT32 = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


class StoredEmbedding(nn.Embedding):
    """An embedding stored in 16 bits that returns float32."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 (the base class's name)
        return super().forward(input).float()


_NARROW: dict[type[nn.Module], type[nn.Module]] = {
    nn.LayerNorm: NarrowLayerNorm,
    StoredEmbedding: nn.Embedding,
}


class StoredScaledEmbedding(StoredEmbedding):
    """A `StoredEmbedding` whose output is multiplied by a scale, as Gemma's."""

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


def store_in(network: nn.Module, dtype: torch.dtype, classifier: Collection[nn.Parameter]) -> None:
    """Store linear layers and embeddings in that dtype, all else and `classifier` in float32."""
    ids = set[int]() if dtype == torch.float32 else _storable(network, classifier)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype if id(parameter) in ids else torch.float32)
    for module in network.modules():
        if (scale := getattr(module, "scalar_embed_scale", None)) is not None:
            # Loading in 16 bits rounded this scale; it rounds no weight of the files.
            rounded = cast(Tensor, module.embed_scale)
            module.embed_scale = torch.full_like(rounded, scale, dtype=torch.float32)
        stored_class = _stored_class(module)
        if stored_class is not None and id(getattr(module, "weight", None)) in ids:
            module.__class__ = stored_class


def _storable(network: nn.Module, classifier: Collection[nn.Parameter]) -> set[int]:
    """Return the ids of the weights that every module using them can have in 16 bits."""
    ids = {id(weight) for weight in network.parameters()} - {id(weight) for weight in classifier}
    fp32_modules = tuple(getattr(network, "_keep_in_fp32_modules", None) or ())
    for name, module in network.named_modules():
        storable = _stored_class(module) is not None
        storable = storable and not any(part in fp32_modules for part in name.split("."))
        for parameter in module.parameters(recurse=False):
            if not storable or parameter is not module.weight:
                ids.discard(id(parameter))
    return ids


_STORED: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: StoredLinear,
    nn.Embedding: StoredEmbedding,
}


def _stored_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that computes the same with a weight of 16 bits; None if there is none."""
    scaled = isinstance(module, nn.Embedding) and hasattr(module, "scalar_embed_scale")
    if scaled and len([*module.parameters(recurse=False)]) == 1:
        return StoredScaledEmbedding
    return _STORED.get(type(module))


def autocasts(x: Tensor) -> bool:
    """Return whether autocast is enabled for the device of a tensor."""
    device = x.device.type
    return torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)


BITS = {"8bit": 8.0, "4bit": 4.127}  # bits of a weight, including its part of the scales


def quantize(
    network: nn.Module, how: str, classifier: Collection[nn.Parameter],
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> None:  # fmt: skip
    """Quantise the linear layers and move them to the device, one by one; compute in `dtype`."""
    try:
        import bitsandbytes  # noqa: PLC0415 (an optional dependency)
    except ImportError as error:
        raise ValueError(
            f"backbone-dtype: bitsandbytes cannot be imported ({error}); install it, "
            "pip install bitsandbytes, or set float32"
        ) from None
    for name, linear in quantizable(network, classifier).items():
        target_device = linear.weight.device if device is None else device
        network.set_submodule(name, _replacement(bitsandbytes, how, linear, dtype, target_device))


def quantizable(network: nn.Module, classifier: Collection[nn.Parameter]) -> dict[str, nn.Linear]:
    """Return the linear layers that are frozen in every method, by name."""
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
    weight = linear.weight.detach().float().cpu()  # may be stored in 16 bits
    if how == "4bit":
        quantized = library.nn.Linear4bit(
            *sides,
            bias=linear.bias is not None,
            compute_dtype=dtype,
            quant_type="nf4",
            device="meta",
        )
        # On some CPUs it would repack its weights for evaluation, in a form without gradients.
        quantized.support_avx512bf16_for_cpu = False
        quantized.weight = library.nn.Params4bit(weight, requires_grad=False, quant_type="nf4")
    else:
        quantized = library.nn.Linear8bitLt(
            *sides, bias=linear.bias is not None, has_fp16_weights=False, device="meta"
        )
        quantized.weight = library.nn.Int8Params(
            weight, requires_grad=False, has_fp16_weights=False
        )
    if linear.bias is not None:
        quantized.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    quantized.weight_norm = float(weight.norm())
    quantized = quantized.to(device)
    if how == "4bit":  # dequantise to the computing dtype, to which float32 is rounded anyway
        quantized.weight.quant_state.dtype = dtype
    return cast(nn.Module, quantized)


def weight_norm(linear: nn.Linear) -> float:
    """Return the weight's norm; for a quantised layer, the norm stored before quantisation."""
    norm = getattr(linear, "weight_norm", None)
    return float(dense_weight(linear).float().norm()) if norm is None else cast(float, norm)


def dense_weight(layer: nn.Module) -> Tensor:
    """Return a layer's weight in floating point; for a packed weight, the outputs of unit vectors.

    bitsandbytes has several packings, and may change them between training and evaluation.
    """
    module: Any = layer
    weight: Tensor = module.weight
    if weight.is_floating_point():
        return weight.detach()
    dtype = torch.float16 if hasattr(module, "state") else torch.float32
    unit = torch.eye(module.in_features, dtype=dtype, device=weight.device)
    bias, module.bias = module.bias, None  # subtracting it afterwards would cost precision
    try:
        with torch.no_grad():
            return cast(Tensor, module(unit).mT.float())
    finally:
        module.bias = bias


def requantize(layer: nn.Module, weight: Tensor) -> None:
    """Replace a quantised layer's weight by another, (out, in)."""
    module: Any = layer
    old = module.weight
    if hasattr(module, "state"):  # a layer of 8 bits
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
