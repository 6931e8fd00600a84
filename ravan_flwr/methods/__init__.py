"""List the federated methods by name; each has one file.

The list holds what a run config is checked against. It names modules, not classes, so that
reading a configuration imports no torch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.methods.base import Method


@dataclass(frozen=True)
class Listed:
    """Say where a method lives, and which options go with it."""

    module: str
    # Of the clients' Adam, where neither the run nor its preset says one; `tune` chooses better.
    learning_rate: float = 1e-3
    # Is the next state the mean of the uploads? Then `server-optimizer` and `robust` may be set.
    averages: bool = True
    # Does it leave the pretrained weights alone? Then `quantize` may be set.
    frozen_backbone: bool = True
    # Keys that change nothing under it: who gives one is told so.
    ignores: tuple[str, ...] = ()


_OF_HEADS = ("heads", "init", "scaling", "scoring", "selection", "calibration-steps")
_NOT_OF_LORA = (*_OF_HEADS, "layer-form")

METHODS = {
    "ravan": Listed("ravan_flwr.methods.ravan", 3e-3, ignores=("lora-scale",)),
    "full": Listed(
        "ravan_flwr.methods.full",
        1e-4,
        frozen_backbone=False,
        ignores=(*_NOT_OF_LORA, "rank", "lora-scale", "init-scale"),
    ),
    "fedit": Listed("ravan_flwr.methods.fedit", ignores=_NOT_OF_LORA),
    "fedex-lora": Listed(
        "ravan_flwr.methods.fedex_lora", averages=False, frozen_backbone=False, ignores=_NOT_OF_LORA
    ),
    "ffa-lora": Listed("ravan_flwr.methods.ffa_lora", 3e-3, ignores=_NOT_OF_LORA),
    # Its first round trains the pretrained weights.
    "fed-sb": Listed(
        "ravan_flwr.methods.fed_sb",
        3e-3,
        frozen_backbone=False,
        ignores=(*_OF_HEADS, "lora-scale", "init-scale"),
    ),
    "hetlora": Listed("ravan_flwr.methods.hetlora", averages=False, ignores=_NOT_OF_LORA),
    "flexlora": Listed("ravan_flwr.methods.flexlora", averages=False, ignores=_NOT_OF_LORA),
}


def get_method(name: str) -> "type[Method]":
    """Load the class of that method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    return cast("type[Method]", importlib.import_module(METHODS[name].module).METHOD)
