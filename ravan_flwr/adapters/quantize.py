"""Keep the frozen backbone in 8 or 4 bits, by bitsandbytes, as QLoRA (Dettmers et al., 2023).

Every linear layer but the classifier and the language-model head is replaced by one that keeps
its weight in few bits and computes in the precision of the run. Adapters stay in float32.
"""

import copy
from collections.abc import Collection
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor, nn

BITS = {"8bit": 8.0, "4bit": 4.127}  # a weight with its share of the scales


def quantize(
    network: nn.Module, how: str, classifier: Collection[nn.Parameter],
    dtype: torch.dtype = torch.float32, device: torch.device | None = None,
) -> None:  # fmt: skip
    """Replace the linear layers, one by one onto the device; they compute in `dtype`."""
    library = _library()
    for name, linear in quantizable(network, classifier).items():
        parent, _, child = name.rpartition(".")
        to = linear.weight.device if device is None else device
        small = _replacement(library, how, linear, dtype, to)
        setattr(network.get_submodule(parent), child, small)


def quantizable(network: nn.Module, classifier: Collection[nn.Parameter]) -> dict[str, nn.Linear]:
    """Find the linear layers that are frozen whatever the method, by name."""
    kept = {id(parameter) for parameter in classifier}
    head = getattr(network, "get_output_embeddings", lambda: None)()
    return {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and module is not head and id(module.weight) not in kept
    }


def _replacement(
    library: ModuleType, how: str, linear: nn.Linear, dtype: torch.dtype, device: torch.device
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
    known = getattr(linear, "weight_norm", None)
    return float(linear.weight.detach().float().norm()) if known is None else cast(float, known)


def dense_weight(layer: nn.Module) -> Tensor:
    """Return a layer's weight in floating point: what it computes of the unit vectors, if packed.

    bitsandbytes has more than one packing, and changes it between training and evaluation.
    """
    known: Any = layer
    weight: Tensor = known.weight
    if weight.is_floating_point():
        return weight.detach()
    dtype = torch.float16 if hasattr(known, "state") else torch.float32
    unit = torch.eye(known.in_features, dtype=dtype, device=weight.device)
    with torch.no_grad():
        y = known(unit)
        return cast(Tensor, (y if known.bias is None else y - known.bias).mT.float())


def requantize(layer: nn.Module, weight: Tensor) -> None:
    """Give a layer of few bits another weight, (out, in)."""
    known: Any = layer
    old = known.weight
    if hasattr(known, "state"):  # of 8 bits
        new = type(old)(weight.cpu(), requires_grad=False, has_fp16_weights=False)
        known.state = copy.copy(known.state)
        known.state.reset_grads()
    else:
        new = type(old)(
            weight.cpu(),
            requires_grad=False,
            compress_statistics=old.compress_statistics,
            quant_type=old.quant_type,
            blocksize=old.blocksize,
            quant_storage=old.quant_storage,
        )
    known.weight = new.to(old.device)


def _library() -> ModuleType:
    try:
        import bitsandbytes  # noqa: PLC0415 (an extra that few need)
    except ImportError as error:
        raise ValueError(
            f"quantize: bitsandbytes cannot be imported ({error}); install it, "
            "pip install 'ravan-flwr[quantize]', or set backbone-dtype=float32"
        ) from None
    library: Any = bitsandbytes
    return cast(ModuleType, library)
