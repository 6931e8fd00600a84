"""Find the layers to adapt, and replace them by adapters."""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from torch import nn

Adapter = TypeVar("Adapter", bound=nn.Module)


@dataclass(frozen=True)
class Layer:
    """The name and the shape of one adapted matrix of a network."""

    name: str
    out_features: int
    in_features: int


# The query and value projections of the self-attention, by architecture (`model_type`); where one
# matrix has queries, keys and values, that matrix. Releases of `transformers` differ in the names
# of some architectures: these have several.
_OF_VISION = ("attention.q_proj", "attention.v_proj", "attention.query", "attention.value")
_OF_BERT = ("self.query", "self.value")
_OF_DECODERS = ("self_attn.q_proj", "self_attn.v_proj")
TARGETS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("vit", "deit", "beit", "dinov2", "swin", "swinv2"), (*_OF_VISION, *_OF_BERT)),
    **dict.fromkeys(("bert", "roberta", "xlm-roberta", "camembert", "electra"), _OF_BERT),
    **dict.fromkeys(
        ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "bart", "mbart"),
        _OF_DECODERS,
    ),
    **dict.fromkeys(("t5", "mt5"), ("SelfAttention.q", "SelfAttention.v")),
    "distilbert": ("attention.q_lin", "attention.v_lin"),
    "deberta-v2": ("self.query_proj", "self.value_proj"),
    "phi3": ("self_attn.qkv_proj",),
    "gpt_neox": ("attention.query_key_value",),
}
# How other architectures name these projections, inside a module with attention in its name.
_QUERY = {"q", "query", "wq", "q_proj", "q_lin", "q_head", "query_proj"}
_VALUE = {"v", "value", "wv", "v_proj", "v_lin", "v_head", "value_proj"}
_FUSED = {"qkv", "wqkv", "qkv_proj", "query_key_value", "c_attn", "in_proj", "in_proj_qkv"}


def find_projections(names: Iterable[str]) -> tuple[str, ...]:
    """Return those of the linear layers that compute queries and values of an attention."""
    split = {name: name.lower().rpartition(".") for name in names}
    ends = {n: end for n, (path, _, end) in split.items() if re.search("attn|attention", path)}
    found = {*ends.values()}
    if not (found & _FUSED or (found & _QUERY and found & _VALUE)):
        return ()
    return tuple(name for name, end in ends.items() if end in _QUERY | _VALUE | _FUSED)


def name_endings(names: Iterable[str]) -> str:
    """Return what follows the number of a block in the layers' names, each ending once."""
    return ", ".join(dict.fromkeys(re.sub(r"^(.*\.)?\d+\.", "", name) for name in names))


def find_layers(
    network: nn.Module, targets: Sequence[str], trained: Iterable[nn.Parameter] = ()
) -> list[Layer]:
    """Return the linear layers whose names end in a target, in the network's order.

    Layers of `trained` parameters, such as a classifier's, are left out: they need no adapter.
    """
    without = {id(parameter) for parameter in trained}
    linears = {
        name: module
        for name, module in network.named_modules()
        if isinstance(module, nn.Linear) and id(module.weight) not in without
    }
    layers = [
        Layer(name, linear.out_features, linear.in_features)
        for name, linear in linears.items()
        if any(name == target or name.endswith("." + target) for target in targets)
    ]
    if not layers:
        raise ValueError(
            f"no layer to adapt: got targets {list(targets)}, expected the ends of names of "
            f"linear layers, such as {next(iter(linears), '')!r}; here these names end in "
            f"{name_endings(linears)}"
        )
    return layers


def attach(
    network: nn.Module, layers: Sequence[Layer], adapt: Callable[[Layer, nn.Linear], Adapter]
) -> dict[str, Adapter]:
    """Replace every layer by the adapter that `adapt` returns; return them by layer name."""
    adapters: dict[str, Adapter] = {}
    for layer in layers:
        linear = cast(nn.Linear, network.get_submodule(layer.name))
        adapters[layer.name] = adapt(layer, linear)
        network.set_submodule(layer.name, adapters[layer.name])
    cast(Any, network).adapted = tuple(adapters)
    return adapters


@contextmanager
def without_adapters(network: nn.Module) -> Iterator[None]:
    """Put the layers without adapters back into the network for the context, without a copy.

    Each adapter has the layer that it replaced as `base`. The result is the pretrained network,
    unless a method changes pretrained weights.
    """
    names: tuple[str, ...] = cast(Any, network).adapted
    adapters = {name: network.get_submodule(name) for name in names}
    bases = {name: adapter.get_submodule("base") for name, adapter in adapters.items()}
    try:
        for name, base in bases.items():
            network.set_submodule(name, base)
        yield
    finally:
        for name, adapter in adapters.items():
            network.set_submodule(name, adapter)
