"""List the federated methods by name; each has one file, of that name with underscores.

The run configuration is checked against this list, which imports no torch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.methods.base import Method

_LORA_KEYS = ("rank", "lora-scale")
_HEAD_KEYS = ("heads", "init", "scaling", "scoring", "selection", "head-mean")


@dataclass(frozen=True)
class MethodInfo:
    """The properties of a method that decide which options it allows."""

    # The learning rate of the clients' Adam if neither the run nor its preset sets one. The command
    # `tune` finds a better one.
    learning_rate: float = 1e-3
    # Is the next state the mean of the uploads? Then `server-optimizer` and `weighting=median` may
    # be set.
    averages: bool = True
    # Do the pretrained weights stay fixed? Then `backbone-dtype` may be set.
    frozen_backbone: bool = True
    # Is the next state the last one plus the mean of the clients' changes, and does nothing else
    # depend on their data? Then `privacy=client` and `secure-aggregation` may be set, and the class
    # derives from `SumsChanges` (extensions.py).
    sums_changes: bool = False
    # Do clients' changes to different versions of the state add up? Then `aggregation=async` may be
    # set. None: the same as sums_changes.
    adds_changes: bool | None = None
    # Does a client train only layers with a rule for per-example gradients
    # (extras/example_privacy/rules.py), and does nothing else that it sends depend on its examples?
    # Then `privacy=example` may be set.
    by_example: bool = False
    # Does each client keep personal parameters (`Personal`)? Then clients evaluate the model.
    personalised: bool = False
    # Does the server have a model of its own, from which a client without personal parameters
    # starts? Then `evaluate-on=server` may be set.
    serves: bool = True
    # Do its layers mix two adapters depending on the input? Then no adapter file and no merged
    # weight can represent the model, and it cannot be exported.
    mixes: bool = False
    # May the broadcast (down) be reduced to the state's largest numbers, and the upload (up) to
    # the largest of the change? Then `sparsity` may be set.
    sparse_down: bool = True
    sparse_up: bool = True
    # Does every client train in every round?
    all_clients: bool = False
    # Does one client per round train, on the examples of all clients?
    pools: bool = False
    # Does it split a layer's update into `heads`?
    has_heads: bool = False
    # Further keys that have no effect with this method; setting one logs a warning.
    ignores: tuple[str, ...] = ()
    module: str = ""  # the module of its class, if not the file of its name in this package

    @property
    def asynchronous(self) -> bool:
        """Return whether an update relative to an older state may be aggregated."""
        return self.sums_changes if self.adds_changes is None else self.adds_changes

    @property
    def ignored(self) -> tuple[str, ...]:
        """Return all keys that have no effect with this method."""
        return (*self.ignores, *(() if self.has_heads else _HEAD_KEYS))


METHODS = {
    "ravan": MethodInfo(
        3e-3, sums_changes=True, has_heads=True, by_example=True, ignores=("lora-scale",)
    ),
    "full": MethodInfo(
        1e-4, frozen_backbone=False, sums_changes=True, sparse_down=False, ignores=_LORA_KEYS
    ),
    "fedit": MethodInfo(sums_changes=True, by_example=True),
    "fedex-lora": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "ffa-lora": MethodInfo(3e-3, sums_changes=True, by_example=True),
    # The first round of these two trains the pretrained weights.
    "fed-sb": MethodInfo(3e-3, adds_changes=True, frozen_backbone=False, ignores=("lora-scale",)),
    "slora": MethodInfo(adds_changes=True, frozen_backbone=False),
    "hetlora": MethodInfo(averages=False, by_example=True),
    "flexlora": MethodInfo(averages=False, by_example=True),
    # A has orthonormal rows from the first round on.
    "fedsvd": MethodInfo(3e-3, averages=False, by_example=True),
    "raflora": MethodInfo(averages=False, by_example=True),
    "flora": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "fedmomentum": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "frlora": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "florist": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "fedrot-lora": MethodInfo(by_example=True),
    "fed-plora": MethodInfo(by_example=True),
    "fslora": MethodInfo(by_example=True),
    "rolora": MethodInfo(by_example=True),
    "lora-fair": MethodInfo(averages=False, by_example=True),
    # The server's state is the mean of all clients' personal heads.
    "fedalt": MethodInfo(
        3e-3,
        averages=False,
        sums_changes=True,
        adds_changes=False,
        personalised=True,
        mixes=True,
        sparse_down=False,
        sparse_up=False,
        all_clients=True,
        has_heads=True,
        ignores=("lora-scale", "head-mean", "clients-per-round", "weighting"),
    ),
    "fedsa-lora": MethodInfo(personalised=True, serves=False),
    "feddpa": MethodInfo(personalised=True, mixes=True),
    "fedrpca": MethodInfo(
        3e-3, averages=False, has_heads=True, by_example=True, ignores=("lora-scale", "head-mean")
    ),
    # The baselines: no adapter, each client alone, and one client with all examples.
    "none": MethodInfo(sums_changes=True, by_example=True, ignores=_LORA_KEYS),
    "local": MethodInfo(
        averages=False,
        personalised=True,
        serves=False,
        all_clients=True,
        ignores=("clients-per-round",),
    ),
    "centralised": MethodInfo(averages=False, pools=True, ignores=("clients-per-round",)),
}


def get_method(name: str) -> "type[Method]":
    """Import the class of a method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    info, default = METHODS[name], f"ravan_flwr.methods.{name.replace('-', '_')}"
    return cast("type[Method]", importlib.import_module(info.module or default).METHOD)


MIXES = "its layers mix two adapters depending on the input, which no other software can load"
