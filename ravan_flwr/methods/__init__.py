"""Federated methods: one file each, listed here by name.

The values name modules, not classes, so that listing the methods imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.methods.base import Method

METHODS = {
    "ravan": "ravan_flwr.methods.ravan",
    "full": "ravan_flwr.methods.full",
    "fedit": "ravan_flwr.methods.fedit",
    "fedex-lora": "ravan_flwr.methods.fedex_lora",
    "ffa-lora": "ravan_flwr.methods.ffa_lora",
    "fed-sb": "ravan_flwr.methods.fed_sb",
    "hetlora": "ravan_flwr.methods.hetlora",
    "flexlora": "ravan_flwr.methods.flexlora",
}


def get_method(name: str) -> "type[Method]":
    """The class of that method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    return cast("type[Method]", importlib.import_module(METHODS[name]).METHOD)
