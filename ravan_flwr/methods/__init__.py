"""List the federated methods by name; each has one file, of that name with underscores.

The list holds what a run config is checked against, and imports no torch.

`BUDGETS` says what part of the trainable parameters each client can afford. The paper gives every
client a budget of 1/4, 1/2, 3/4 or 1 of the largest, fixed for the run, and draws the client mix
as bars without numbers; the fractions below are ours."""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.methods.base import Method
import hashlib
import math

_OF_LORA = ("rank", "lora-scale")
_OF_HEADS = ("heads", "init", "scaling", "scoring", "selection", "head-mean")


@dataclass(frozen=True)
class MethodInfo:
    """Say which options a method allows."""

    # Of the clients' Adam, where neither the run nor its preset says one; `tune` chooses better.
    learning_rate: float = 1e-3
    # Is the next state the mean of the uploads? Then `server-optimizer` may be set, and
    # `weighting=median`.
    averages: bool = True
    # Does it leave the pretrained weights alone? Then `backbone-dtype` may be set.
    frozen_backbone: bool = True
    # Is the next state the last one and the mean of what clients change in it, and does nothing
    # else depend on their data? Then `privacy=client` and `secure-aggregation` may be set, and its
    # class has the functions of `SumsChanges` (extensions.py).
    sums_changes: bool = False
    # Does its state move by the clients' changes, so that one against an older state adds up with
    # others? Then `aggregation=async` may be set; None: as sums_changes says.
    adds_changes: bool | None = None
    # Is all that a client trains made of layers whose gradients are known by example
    # (adapters/by_example.py), and does nothing else that it sends depend on its examples? Then
    # `privacy=example` may be set.
    by_example: bool = False
    # Does a part of the model stay with each client (`Personal`)? Then clients evaluate it.
    personalised: bool = False
    # Has the server a model, too, with which a client without such a part begins? Then
    # `evaluate-on=server` may be set.
    serves: bool = True
    # Do its layers mix two adapters by their input? No adapter and no weight does that: no export.
    mixes: bool = False
    # Can its clients begin from the largest numbers of its state, and can it do with the largest of
    # a change? Then `sparsity` may be set.
    sparse_down: bool = True
    sparse_up: bool = True
    # Does every client train in every round?
    everyone: bool = False
    # Does one client train in a round, on the examples of all?
    pools: bool = False
    # Does it share a layer's update out among `heads`?
    has_heads: bool = False
    # Other keys that change nothing under it, of which a user is warned.
    ignores: tuple[str, ...] = ()
    module: str = ""  # where its class is, if not in the file of its name here

    @property
    def asynchronous(self) -> bool:
        """Return whether changes against an older state count."""
        return self.sums_changes if self.adds_changes is None else self.adds_changes

    @property
    def ignored(self) -> tuple[str, ...]:
        """List all keys that change nothing under it."""
        return (*self.ignores, *(() if self.has_heads else _OF_HEADS))


METHODS = {
    "ravan": MethodInfo(
        3e-3, sums_changes=True, has_heads=True, by_example=True, ignores=("lora-scale",)
    ),
    "full": MethodInfo(
        1e-4, frozen_backbone=False, sums_changes=True, sparse_down=False, ignores=_OF_LORA
    ),
    "fedit": MethodInfo(sums_changes=True, by_example=True),
    "fedex-lora": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "ffa-lora": MethodInfo(3e-3, sums_changes=True, by_example=True),
    # Their first round trains the pretrained weights.
    "fed-sb": MethodInfo(3e-3, adds_changes=True, frozen_backbone=False, ignores=("lora-scale",)),
    "slora": MethodInfo(adds_changes=True, frozen_backbone=False),
    "hetlora": MethodInfo(averages=False, by_example=True),
    "flexlora": MethodInfo(averages=False, by_example=True),
    # Its A has orthonormal rows from the first round on.
    "fedsvd": MethodInfo(3e-3, averages=False, by_example=True),
    "raflora": MethodInfo(averages=False, by_example=True),
    "flora": MethodInfo(averages=False, frozen_backbone=False, by_example=True),
    "fedrot-lora": MethodInfo(by_example=True),
    "fed-plora": MethodInfo(by_example=True),
    "rolora": MethodInfo(by_example=True),
    "lora-fair": MethodInfo(averages=False, by_example=True),
    # Its server has the mean of all clients' own heads.
    "fedalt": MethodInfo(
        3e-3,
        averages=False,
        sums_changes=True,
        adds_changes=False,
        personalised=True,
        mixes=True,
        sparse_down=False,
        sparse_up=False,
        everyone=True,
        has_heads=True,
        ignores=("lora-scale", "head-mean", "clients-per-round", "weighting"),
    ),
    "fedsa-lora": MethodInfo(personalised=True, serves=False),
    "feddpa": MethodInfo(personalised=True, mixes=True),
    "fedrpca": MethodInfo(
        3e-3, averages=False, has_heads=True, by_example=True, ignores=("lora-scale", "head-mean")
    ),
    # The references: no adapter, each client alone, and one that has all examples.
    "none": MethodInfo(sums_changes=True, by_example=True, ignores=_OF_LORA),
    "local": MethodInfo(
        averages=False,
        personalised=True,
        serves=False,
        everyone=True,
        ignores=("clients-per-round",),
    ),
    "centralised": MethodInfo(averages=False, pools=True, ignores=("clients-per-round",)),
}


def get_method(name: str) -> "type[Method]":
    """Load the class of that method: `METHOD` in its module."""
    if name not in METHODS:
        raise ValueError(f"method {name!r} is unknown; expected one of {', '.join(METHODS)}")
    info, default = METHODS[name], f"ravan_flwr.methods.{name.replace('-', '_')}"
    return cast("type[Method]", importlib.import_module(info.module or default).METHOD)


MIXES = "its layers mix two adapters by what they are given, which no file of other software does"

BUDGET_FRACTIONS = (0.25, 0.5, 0.75, 1.0)

# The fraction of the clients at each budget.
BUDGETS: dict[str, tuple[float, float, float, float]] = {
    "full": (0.0, 0.0, 0.0, 1.0),
    "uniform": (0.25, 0.25, 0.25, 0.25),
    "bell": (0.1, 0.4, 0.4, 0.1),
    "skewed-right": (0.5, 0.25, 0.15, 0.1),
    # Simulated devices have their budgets by training/work.py.
    "by-speed": (0.0, 0.0, 0.0, 1.0),
}

_GOLDEN = (math.sqrt(5) - 1) / 2


def budget_fraction(distribution: str, seed: int, partition_id: int) -> float:
    """Draw a client's budget fraction: a function of (seed, partition id) and of nothing else.

    Steps of the golden ratio from a seeded start fill [0, 1) evenly, so that any number of
    clients comes close to the fractions, where independent draws would scatter about them.
    """
    digest = hashlib.sha256(f"budget {seed}".encode()).digest()
    start = int.from_bytes(digest[:8], "big") / 2**64
    position = (start + partition_id * _GOLDEN) % 1.0
    reached = 0.0
    for fraction, part in zip(
        BUDGET_FRACTIONS, BUDGETS[distribution.partition(":")[0]], strict=True
    ):
        reached += part
        if position < reached:
            return fraction
    return BUDGET_FRACTIONS[-1]


def affordable(fraction: float, number: int) -> int:
    """Count the heads, or ranks, that a budget pays for: floor(fraction * number), at least 1."""
    # A fraction such as 0.29 of 100 must give 29 although its product is 28.999999999999996.
    return max(1, math.floor(fraction * number + 1e-9))
