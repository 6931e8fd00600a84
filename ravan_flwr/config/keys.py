"""The keys of a run config: what each may hold, and errors that say so.

A run config is what `[tool.flwr.app.config]` holds and `flwr run . -c "key=value"`
overrides: flat, kebab-case, with bool, int, float and str values. A key that is `"auto"`
takes the preset's value, or where presets have none what its help says.
"""

import difflib
import math
from collections.abc import Iterable
from dataclasses import dataclass

from ravan_flwr.methods import METHODS
from ravan_flwr.methods.budgets import BUDGETS
from ravan_flwr.specs import Scalar

AUTO = "auto"


@dataclass(frozen=True)
class Key:
    """What one key of the run config may hold."""

    kind: type[int] | type[float] | type[str]
    default: Scalar
    help: str
    choices: tuple[str, ...] = ()
    low: float = -math.inf
    high: float = math.inf
    low_open: bool = False  # is `low` itself out of range?

    def allowed(self) -> str:
        """What the key takes, in words."""
        if self.choices:
            return "one of " + ", ".join(self.choices)
        if self.kind is str:
            return "a text"
        noun = "a whole number" if self.kind is int else "a number"
        bounds = []
        if self.low > -math.inf:
            bounds.append(f"{'above' if self.low_open else 'at least'} {_plain(self.low)}")
        if self.high < math.inf:
            bounds.append(f"at most {_plain(self.high)}")
        return " ".join([noun, " and ".join(bounds)]).strip()


def _plain(bound: float) -> str:
    """A bound with all its digits: 281474976710656 is not 2.8e+14."""
    return f"{int(bound)}" if bound == int(bound) else f"{bound:.10g}"


# What each key is. `pyproject.toml` repeats the defaults for Flower, and a test compares them.
KEYS: dict[str, Key] = {
    "preset": Key(str, "digits-vit", "task, model and settings: a file of conf/"),
    "model": Key(
        str, AUTO, "in place of the preset's: an id of the hub, id@revision, or a folder"
    ),
    "targets": Key(
        str, AUTO, "layers to adapt, by the ends of their names, with commas; auto: q and v"
    ),
    "data": Key(
        str, AUTO, "in place of the preset's, of its schema: an id of the hub, or a folder"
    ),
    "glue-task": Key(
        str, AUTO, "of preset glue-llama", ("mnli", "qnli", "qqp", "sst2", "rte")
    ),
    "method": Key(str, "ravan", "federated method", tuple(METHODS)),
    "seed": Key(int, 0, "every random choice is a function of it", low=0, high=2**31 - 1),
    "num-rounds": Key(int, AUTO, "rounds", low=1, high=1_000_000),
    "clients-per-round": Key(int, AUTO, "clients sampled in a round", low=1, high=1_000_000),
    "local-steps": Key(int, AUTO, "a client's optimiser steps in a round", low=1, high=1_000_000),
    "batch-size": Key(int, AUTO, "examples in a step", low=1, high=65_536),
    "learning-rate": Key(float, AUTO, "Adam's", low=0, low_open=True, high=10),
    "proximal-mu": Key(float, 0.0, "FedProx: pull towards the round's start", low=0, high=1e6),
    "weighting": Key(str, "uniform", "of the replies in the mean", ("uniform", "examples")),
    "server-optimizer": Key(
        str, "none", "on the aggregated update, as FedAvgM or FedAdam", ("none", "momentum", "adam")
    ),
    "server-learning-rate": Key(
        float, AUTO, "the server optimiser's; auto: 1, or 0.01 for adam", low=0, low_open=True,
        high=1e3,
    ),
    "server-momentum": Key(float, 0.9, "momentum's beta, Adam's beta 1", low=0, high=0.9999),
    "partition": Key(
        str, AUTO, "how simulated clients share the data",
        ("iid", "dirichlet", "dirichlet-by-client"),
    ),
    "partition-alpha": Key(
        float, AUTO, "Dirichlet concentration", low=0, low_open=True, high=1_000_000
    ),
    "parameter-budget": Key(
        str, "lower", "of the preset's two: its ranks and rates", ("lower", "higher")
    ),
    "lora-rank": Key(
        int, AUTO, "the budget: as many parameters as a LoRA of this rank has", low=1, high=65_536
    ),
    "rank": Key(
        int, AUTO, "r; auto: the preset's, or what the budget allows the method", low=1, high=65_536
    ),
    "lora-scale": Key(
        float, 1.0, "alpha / r of the LoRA methods", low=0, low_open=True, high=1e3
    ),
    "heads": Key(int, AUTO, "h, RAVAN's heads in every adapted matrix", low=1, high=4_096),
    "init": Key(
        str, AUTO, "how the frozen bases are made",
        ("gram-schmidt", "normal", "constant", "shared-subspace", "data-aware"),
    ),
    "init-scale": Key(
        float, 1.0, "norm of the columns of B_i and the rows of A_i, of a LoRA's rows of A",
        low=0, low_open=True, high=1e3,
    ),
    "calibration-steps": Key(
        int, 8, "batches from which data-aware bases are made", low=1, high=1_000_000
    ),
    "calibration-learning-rate": Key(
        float, AUTO, "of Fed-SB's first round; auto: the preset's of method full, or the run's",
        low=0, low_open=True, high=10,
    ),
    "scaling": Key(str, "trained", "the scales s_i of the heads", ("trained", "constant")),
    "scoring": Key(str, "random", "how a client ranks the heads", ("random", "weight", "gradient")),
    "selection": Key(
        str, "layer", "K heads in each layer, or as many anywhere", ("layer", "global")
    ),
    "budgets": Key(str, "full", "distribution of the clients' budgets", tuple(BUDGETS)),
    "classifier": Key(
        str, AUTO, "random and frozen, or trained and averaged", ("frozen", "trained")
    ),
    "eval-every": Key(int, AUTO, "evaluate after every so many rounds", low=1, high=1_000_000),
    "device": Key(str, AUTO, "auto, cpu, cuda, cuda:N or mps"),
    "precision": Key(
        str, "float32", "of the local steps' products", ("float32", "bfloat16", "float16")
    ),
    "max-length": Key(
        int, AUTO, "tokens of a text, the rest is cut off", low=1, high=1_048_576
    ),
    "gradient-checkpointing": Key(
        str, "no", "compute activations twice and keep few", ("yes", "no")
    ),
    "wire": Key(
        str, "float32", "how numbers travel, both ways; int8: by head, rounded at random",
        ("float32", "float16", "bfloat16", "int8"),
    ),
    "layer-form": Key(
        str, AUTO, "how multi-head layers are computed; auto: what is less work, and exact",
        (AUTO, "merged", "factored"),
    ),
    "quantize": Key(
        str, "none", "the frozen backbone, by bitsandbytes", ("none", "8bit", "4bit")
    ),
    "output-dir": Key(str, AUTO, "folder of the run directories, an absolute path"),
    "resume": Key(str, "", "a run directory to go on with; RUN@N goes back to after round N"),
    "report": Key(str, "yes", "a page and pictures at the end of the run", ("yes", "no")),
    "tracking": Key(
        str, "tensorboard", "who is told of each round; wandb and mlflow beside tensorboard",
        ("tensorboard", "wandb", "mlflow", "none"),
    ),
    "evaluate-on": Key(
        str, "server", "the server's test examples, or each client's own validation part",
        ("server", "clients"),
    ),
    "validation-share": Key(
        float, 0.0, "of its examples that a client holds back to evaluate on", low=0, high=0.9
    ),
    "round-timeout": Key(
        float, 3600.0, "seconds to wait for the replies of a round", low=0, low_open=True
    ),
    "straggler-grace": Key(
        float, AUTO, "seconds from the min-replies-th good reply until a round closes; auto: from "
        "half of the replies, ten times what they took, at least 60", low=0,
    ),
    "over-sample": Key(
        float, 1.0, "times as many clients are asked; the first clients-per-round are used",
        low=1, high=10,
    ),
    "max-examples": Key(
        int, AUTO, "as how many examples a device's own count, at most; auto: ten times the median",
        low=1, high=2**48,
    ),
    "min-replies": Key(
        int, 1, "valid replies without which a round stops the run", low=1, high=1_000_000
    ),
    "robust": Key(
        str, "none", "in place of the mean, against a few false replies",
        ("none", "median", "trimmed-mean"),
    ),
    "max-update-norm": Key(
        float, AUTO, "largest norm of a reply's change; auto: by learning-rate and what is usual",
        low=0, low_open=True,
    ),
    "max-share": Key(
        float, 1.0, "the largest budget that a node is granted, whatever it claims", low=0,
        low_open=True, high=1,
    ),
}  # fmt: skip


def check_key(key: str, value: Scalar) -> Scalar:
    """The value, with whole numbers widened where the key is a float."""
    if key not in KEYS:
        raise ValueError(
            f"unknown key {key!r}{_did_you_mean(key, KEYS)} The keys are: {', '.join(KEYS)}"
        )
    spec = KEYS[key]
    if value == AUTO and spec.default == AUTO:
        return value
    problem = f"{key} = {value!r}: expected {spec.allowed()}"
    if spec.default == AUTO:
        problem += ', or "auto"'
    if isinstance(value, bool):
        raise ValueError(f"{problem}; got a truth value")
    if spec.kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, spec.kind):
        raise ValueError(f"{problem}; got a {_TYPE_NAMES[type(value)]}")
    if spec.choices:
        check_choice(key, str(value), spec.choices)
    if isinstance(value, int | float):
        inside = spec.low < value if spec.low_open else spec.low <= value
        if not (math.isfinite(value) and inside and value <= spec.high):
            raise ValueError(f"{problem}; change it")
    return value


_TYPE_NAMES = {str: "text", int: "whole number", float: "decimal number"}


def check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    """Raise ValueError, with the nearest match, unless the value is among the choices."""
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{key} {value!r} is unknown{_did_you_mean(value, choices)} "
            f"Expected one of: {', '.join(choices)}"
        )


def _did_you_mean(value: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(choices), n=1)
    return f": did you mean {near[0]!r}?" if near else "."
