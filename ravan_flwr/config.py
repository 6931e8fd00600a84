"""The one reader of the configuration: run config and preset in, a frozen `Config` out.

A run config is what `[tool.flwr.app.config]` holds and `flwr run . -c "key=value"`
overrides: flat, kebab-case, with bool, int, float and str values. A key that is `"auto"`
takes the preset's value. Everything is checked here, before anything is loaded; below
this module there are only plain arguments.
"""

import dataclasses
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from ravan_flwr.budgets import BUDGETS
from ravan_flwr.methods import METHODS
from ravan_flwr.tasks import TASKS

Scalar: TypeAlias = bool | int | float | str

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
            bounds.append(f"{'above' if self.low_open else 'at least'} {self.low:.10g}")
        if self.high < math.inf:
            bounds.append(f"at most {self.high:.10g}")
        return " ".join([noun, " and ".join(bounds)]).strip()


def _presets() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in conf_folder().glob("*.yaml")))


def conf_folder() -> Path:
    """`conf/` of a checkout or an app bundle, or inside the package of an installed wheel."""
    package = Path(__file__).resolve().parent
    for folder in (package.parent / "conf", package / "conf"):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"presets: found no folder conf/ beside or in {package}; expected the presets that "
        "came with ravan-flwr; install it again"
    )


# What each key is. `pyproject.toml` repeats the defaults for Flower, and a test compares them.
KEYS: dict[str, Key] = {
    "preset": Key(str, "digits-vit", "task, model and settings: a file of conf/"),
    "method": Key(str, "ravan", "federated method", tuple(METHODS)),
    "seed": Key(int, 0, "every random choice is a function of it", low=0, high=2**31 - 1),
    "num-rounds": Key(int, AUTO, "rounds", low=1, high=1_000_000),
    "clients-per-round": Key(int, AUTO, "clients sampled in a round", low=1, high=1_000_000),
    "local-steps": Key(int, AUTO, "a client's optimiser steps in a round", low=1, high=1_000_000),
    "batch-size": Key(int, AUTO, "examples in a step", low=1, high=65_536),
    "learning-rate": Key(float, AUTO, "Adam's", low=0, low_open=True, high=10),
    "partition": Key(str, AUTO, "how simulated clients share the data", ("iid", "dirichlet")),
    "partition-alpha": Key(
        float, AUTO, "Dirichlet concentration", low=0, low_open=True, high=1_000_000
    ),
    "rank": Key(int, AUTO, "r; auto: what the preset's budget allows", low=1, high=65_536),
    "heads": Key(int, AUTO, "h, RAVAN's heads in every adapted matrix", low=1, high=4_096),
    "init": Key(
        str, AUTO, "how the frozen bases are made",
        ("gram-schmidt", "normal", "constant", "shared-subspace"),
    ),
    "init-scale": Key(
        float, 1.0, "norm of the columns of B_i and the rows of A_i", low=0, low_open=True, high=1e3
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
    "output-dir": Key(str, AUTO, "folder of the run directories, an absolute path"),
    "resume": Key(str, "", "a run directory to go on with"),
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
    "max-update-norm": Key(
        float, 1e6, "a reply with a larger norm is rejected", low=0, low_open=True
    ),
}  # fmt: skip

_FROM_PRESET = {
    key for key, spec in KEYS.items() if spec.default == AUTO
} - {"learning-rate", "rank", "device", "output-dir"}  # fmt: skip


@dataclass(frozen=True)
class ModelSpec:
    """Where the backbone comes from."""

    source: str  # "bundled": a file of ravan_flwr/backbones
    name: str


@dataclass(frozen=True)
class DataSpec:
    """Where the examples come from, and what their columns are called."""

    source: str  # "sklearn-digits"
    label_column: str


@dataclass(frozen=True)
class Config:
    """A run, resolved: every choice made, every value checked."""

    preset: str
    task: str
    model: ModelSpec
    data: DataSpec
    lora_rank: int
    method: str
    seed: int
    num_clients: int  # of the preset; a federation may have another number
    num_rounds: int
    clients_per_round: int
    local_steps: int
    batch_size: int
    learning_rate: float
    partition: str
    partition_alpha: float
    rank: int | None  # None: the largest within the budget, known once the layers are
    heads: int
    init: str
    init_scale: float
    scaling: str
    scoring: str
    selection: str
    budgets: str
    classifier: str
    eval_every: int
    device: str
    precision: str
    output_dir: str
    resume: str
    evaluate_on: str
    validation_share: float
    round_timeout: float
    max_update_norm: float

    def as_dict(self) -> dict[str, Any]:
        """For `config.json`: kebab-case keys, as in the run config."""
        return _kebab(dataclasses.asdict(self))


def _kebab(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("_", "-"): _kebab(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def read_config(run_config: Mapping[str, Scalar]) -> Config:
    """Check a run config, read its preset, and resolve every `"auto"`."""
    values = {key: _check_key(key, run_config[key]) for key in run_config}
    for key, spec in KEYS.items():
        values.setdefault(key, spec.default)

    name = str(values["preset"])
    _check_choice("preset", name, _presets())
    preset = _Preset.read(conf_folder() / f"{name}.yaml")
    for key in _FROM_PRESET:
        if values[key] == AUTO:
            values[key] = preset.run[key]
    if values["learning-rate"] == AUTO:
        method, classifier = str(values["method"]), str(values["classifier"])
        values["learning-rate"] = preset.default_learning_rate(method, classifier)
    _check_device(str(values["device"]))
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )
    fields: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    fields["rank"] = None if fields["rank"] == AUTO else fields["rank"]
    return Config(
        task=preset.task,
        model=preset.model,
        data=preset.data,
        lora_rank=preset.lora_rank,
        num_clients=preset.run["num-clients"],
        **fields,
    )


def _check_key(key: str, value: Scalar) -> Scalar:
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
        _check_choice(key, str(value), spec.choices)
    if isinstance(value, int | float):
        inside = spec.low < value if spec.low_open else spec.low <= value
        if not (math.isfinite(value) and inside and value <= spec.high):
            raise ValueError(f"{problem}; change it")
    return value


_TYPE_NAMES = {str: "text", int: "whole number", float: "decimal number"}


def _check_choice(key: str, value: str, choices: Iterable[str]) -> None:
    choices = tuple(choices)
    if value not in choices:
        raise ValueError(
            f"{key} {value!r} is unknown{_did_you_mean(value, choices)} "
            f"Expected one of: {', '.join(choices)}"
        )


def _did_you_mean(value: str, choices: Iterable[str]) -> str:
    near = difflib.get_close_matches(value, list(choices), n=1)
    return f": did you mean {near[0]!r}?" if near else "."


def _check_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if kind not in (AUTO, "cpu", "cuda", "mps") or (number and not number.isdigit()):
        raise ValueError(f"device = {device!r}: expected auto, cpu, cuda, cuda:N or mps; change it")


_PRESET_FIELDS = {"task", "model", "data", "lora-rank", "run", "learning-rate"}


@dataclass(frozen=True)
class _Preset:
    """A file of `conf/`, checked."""

    task: str
    model: ModelSpec
    data: DataSpec
    lora_rank: int
    run: dict[str, Any]
    learning_rate: dict[str, dict[str, float]]  # method -> classifier -> value
    path: Path

    @classmethod
    def read(cls, path: Path) -> "_Preset":
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        _check_fields(path, "", content, _PRESET_FIELDS)
        _check_fields(path, "model.", content["model"], {"source", "name"})
        _check_fields(path, "data.", content["data"], {"source", "label-column"})
        _check_fields(path, "run.", content["run"], _FROM_PRESET | {"num-clients"})
        if content["task"] not in TASKS:
            raise ValueError(
                f"{path}: task = {content['task']!r}: expected one of {', '.join(TASKS)}; change it"
            )
        clients = content["run"]["num-clients"]
        if not isinstance(clients, int) or clients < 1:
            raise ValueError(
                f"{path}: run.num-clients = {clients!r}: expected a whole number at least 1; "
                "change it"
            )
        try:
            run = {k: _check_key(k, content["run"][k]) for k in _FROM_PRESET}
            for by_classifier in content["learning-rate"].values():
                for rate in by_classifier.values():
                    _check_key("learning-rate", rate)
            _check_key("rank", content["lora-rank"])
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        return cls(
            task=content["task"],
            model=ModelSpec(**content["model"]),
            data=DataSpec(**{k.replace("-", "_"): v for k, v in content["data"].items()}),
            lora_rank=content["lora-rank"],
            run=run | {"num-clients": clients},
            learning_rate=content["learning-rate"],
            path=path,
        )

    def default_learning_rate(self, method: str, classifier: str) -> float:
        try:
            return self.learning_rate[method][classifier]
        except KeyError:
            raise ValueError(
                f"{self.path} has no learning rate for method {method!r} with classifier "
                f"{classifier!r}; give one with learning-rate=..."
            ) from None


def _check_fields(path: Path, prefix: str, content: Any, expected: set[str]) -> None:
    if not isinstance(content, dict):
        raise ValueError(
            f"{path}: {prefix or 'the file'} is no mapping, expected one with {sorted(expected)}"
        )
    for field in sorted(set(content) ^ expected):
        state = "unknown" if field in content else "missing"
        raise ValueError(
            f"{path}: {prefix}{field} is {state}; expected the fields {sorted(expected)}"
        )
