"""Federated methods: one file each, listed here by name.

The values name modules, not classes, so that listing the methods imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.methods.base import Method

METHODS = {
    "ravan": "ravan_flwr.methods.ravan",
}


def get_method(name: str) -> "type[Method]":
    """The class of that method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    return cast("type[Method]", importlib.import_module(METHODS[name]).METHOD)
