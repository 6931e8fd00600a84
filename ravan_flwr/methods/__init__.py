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
class MethodInfo:
    """Say where a method lives, and which options go with it."""

    module: str
    # Of the clients' Adam, where neither the run nor its preset says one; `tune` chooses better.
    learning_rate: float = 1e-3
    # Is the next state the mean of the uploads? Then `server-optimizer` and `robust` may be set.
    averages: bool = True
    # Does it leave the pretrained weights alone? Then `quantize` may be set.
    frozen_backbone: bool = True
    # Is the next state the last one and the mean of what clients change in it, and does nothing
    # else depend on their data? Then `privacy` may be set.
    sums_changes: bool = False
    # Is all that a client trains made of layers whose gradients are known by example
    # (adapters/by_example.py), and does nothing else that it sends depend on its examples? Then
    # `privacy=example` may be set.
    by_example: bool = False
    # Does a part of the model stay with each client (personal.py)? Then clients evaluate it.
    personalised: bool = False
    # Does every client train in every round?
    everyone: bool = False
    # Does one client train in a round, on the examples of all?
    pools: bool = False
    # Does it share a layer's update out among `heads`?
    has_heads: bool = False
    # Other keys that change nothing under it, so that who gives one is told so.
    ignores: tuple[str, ...] = ()

    @property
    def ignored(self) -> tuple[str, ...]:
        """List all keys that change nothing under it."""
        return (*self.ignores, *(() if self.has_heads else _OF_HEADS))


_OF_HEADS = (
    "heads", "init", "scaling", "scoring", "selection", "head-mean", "calibration-steps"
)  # fmt: skip

METHODS = {
    "ravan": MethodInfo(
        "ravan_flwr.methods.ravan",
        3e-3,
        sums_changes=True,
        has_heads=True,
        by_example=True,
        ignores=("lora-scale",),
    ),
    "full": MethodInfo(
        "ravan_flwr.methods.full",
        1e-4,
        frozen_backbone=False,
        sums_changes=True,
        ignores=("layer-form", "rank", "lora-scale", "init-scale"),
    ),
    "fedit": MethodInfo(
        "ravan_flwr.methods.fedit", sums_changes=True, by_example=True, ignores=("layer-form",)
    ),
    "fedex-lora": MethodInfo(
        "ravan_flwr.methods.fedex_lora",
        averages=False,
        frozen_backbone=False,
        by_example=True,
        ignores=("layer-form",),
    ),
    "ffa-lora": MethodInfo(
        "ravan_flwr.methods.ffa_lora",
        3e-3,
        sums_changes=True,
        by_example=True,
        ignores=("layer-form",),
    ),
    # Its first round trains the pretrained weights.
    "fed-sb": MethodInfo(
        "ravan_flwr.methods.fed_sb",
        3e-3,
        frozen_backbone=False,
        ignores=("lora-scale", "init-scale"),
    ),
    "hetlora": MethodInfo(
        "ravan_flwr.methods.hetlora", averages=False, by_example=True, ignores=("layer-form",)
    ),
    "flexlora": MethodInfo(
        "ravan_flwr.methods.flexlora", averages=False, by_example=True, ignores=("layer-form",)
    ),
    # Its A has orthonormal rows from the first round on.
    "fedsvd": MethodInfo(
        "ravan_flwr.methods.fedsvd",
        3e-3,
        averages=False,
        by_example=True,
        ignores=("layer-form", "init-scale"),
    ),
    "raflora": MethodInfo(
        "ravan_flwr.methods.raflora", averages=False, by_example=True, ignores=("layer-form",)
    ),
    "flora": MethodInfo(
        "ravan_flwr.methods.flora",
        averages=False,
        frozen_backbone=False,
        by_example=True,
        ignores=("layer-form",),
    ),
    "fedrot-lora": MethodInfo(
        "ravan_flwr.methods.fedrot_lora", by_example=True, ignores=("layer-form",)
    ),
    "fed-plora": MethodInfo(
        "ravan_flwr.methods.fed_plora", by_example=True, ignores=("layer-form",)
    ),
    "rolora": MethodInfo("ravan_flwr.methods.rolora", by_example=True, ignores=("layer-form",)),
    "lora-fair": MethodInfo(
        "ravan_flwr.methods.lora_fair", averages=False, by_example=True, ignores=("layer-form",)
    ),
    "fedsa-lora": MethodInfo(
        "ravan_flwr.methods.fedsa_lora", personalised=True, ignores=("layer-form",)
    ),
    # The references: no adapter, each client alone, and one that has all examples.
    "none": MethodInfo(
        "ravan_flwr.methods.no_adapter",
        sums_changes=True,
        by_example=True,
        ignores=("layer-form", "rank", "lora-scale", "init-scale"),
    ),
    "local": MethodInfo(
        "ravan_flwr.methods.local",
        averages=False,
        personalised=True,
        everyone=True,
        ignores=("layer-form", "clients-per-round"),
    ),
    "centralised": MethodInfo(
        "ravan_flwr.methods.centralised",
        averages=False,
        pools=True,
        ignores=("layer-form", "clients-per-round"),
    ),
}


def get_method(name: str) -> "type[Method]":
    """Load the class of that method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    return cast("type[Method]", importlib.import_module(METHODS[name].module).METHOD)
