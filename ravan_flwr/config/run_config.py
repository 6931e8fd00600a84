"""The one reader of the configuration: run config and preset in, a frozen `Config` out.

Everything is checked here, before anything is loaded; below this module there are only
plain arguments.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import AUTO, KEYS, check_key
from ravan_flwr.config.preset import FROM_PRESET, Preset
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.layer_form import layer_form
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar


@dataclass(frozen=True)
class Config:
    """A run, resolved: every choice made, every value checked."""

    preset: str
    task: str
    model: ModelSpec
    data: DataSpec
    glue_task: str  # "" where there is none
    method: str
    seed: int
    num_clients: int  # of the preset; a federation may have another number
    num_rounds: int
    clients_per_round: int
    local_steps: int
    batch_size: int
    learning_rate: float
    proximal_mu: float
    weighting: str
    server_optimizer: str
    server_learning_rate: float
    server_momentum: float
    partition: str
    partition_alpha: float
    rank: int | None  # None: the largest within the budget, known once the layers are
    lora_scale: float
    parameter_budget: str
    lora_rank: int  # the budget: the parameters of a LoRA of this rank
    heads: int
    init: str
    init_scale: float
    calibration_steps: int
    calibration_learning_rate: float
    scaling: str
    scoring: str
    selection: str
    budgets: str
    classifier: str
    eval_every: int
    device: str
    precision: str
    max_length: int  # tokens of a text; 0 where there is none
    gradient_checkpointing: str
    wire: str
    layer_form: str
    quantize: str
    output_dir: str
    resume: str
    report: str
    tracking: str
    evaluate_on: str
    validation_share: float
    round_timeout: float
    straggler_grace: float | None  # None: by how long the first half took
    over_sample: float
    max_examples: int | None  # None: by what the others have
    min_replies: int
    robust: str
    max_update_norm: float | None  # None: a multiple of what is usual
    max_share: float

    def as_dict(self) -> dict[str, Any]:
        """For `config.json`: kebab-case keys, as in the run config, and what JSON holds."""
        values = _kebab(dataclasses.asdict(self))
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


def _kebab(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("_", "-"): _kebab(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def resolved_config(content: Mapping[str, Any], where: str) -> Config:
    """The configuration that a run's `config.json` holds; `as_dict` is the inverse."""
    values = _snake(content)
    fields = {field.name for field in dataclasses.fields(Config)}
    if values.keys() != fields:
        different = sorted(key.replace("_", "-") for key in values.keys() ^ fields)
        raise ValueError(
            f"{where}: its config.json lacks or has too many of {different}, expected the fields "
            "of this version; use the version of ravan-flwr that made the run"
        )
    values["model"] = ModelSpec(**_snake(values["model"]))
    values["data"] = DataSpec(**_snake(values["data"]))
    return Config(**values)


def _snake(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _tuples(value) for key, value in values.items()}


def _tuples(value: Any) -> Any:
    """JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


def read_config(run_config: Mapping[str, Scalar]) -> Config:
    """Check a run config, read its preset, and resolve every `"auto"`."""
    values = {key: check_key(key, run_config[key]) for key in run_config}
    for key, spec in KEYS.items():
        values.setdefault(key, spec.default)

    preset = Preset.read(str(values["preset"]))
    for key in FROM_PRESET:
        if values[key] == AUTO:
            values[key] = preset.run[key]
    budget, method = str(values["parameter-budget"]), str(values["method"])
    if values["rank"] == AUTO and run_config.get("lora-rank", AUTO) == AUTO:
        # The preset's ranks are those of its own heads, model and targets.
        own = run_config.get("heads", AUTO) in (AUTO, preset.run["heads"])
        own = own and {run_config.get(key, AUTO) for key in ("model", "targets")} == {AUTO}
        values["rank"] = preset.ranks[budget].get(method, AUTO) if own else AUTO
    if values["lora-rank"] == AUTO:
        values["lora-rank"] = preset.lora_rank[budget]
    if values["learning-rate"] == AUTO:
        values["learning-rate"] = preset.learning_rate(method, values)
    if values["calibration-learning-rate"] == AUTO:
        known = "full" in preset.rates
        rate = preset.learning_rate("full", values) if known else values["learning-rate"]
        values["calibration-learning-rate"] = rate
    if values["server-learning-rate"] == AUTO:
        values["server-learning-rate"] = 0.01 if values["server-optimizer"] == "adam" else 1.0
    _check_device(str(values["device"]))
    _check_replies(values)
    _check_method(values)
    layer_form(str(values["layer-form"]), str(values["precision"]), str(values["quantize"]))
    if values["evaluate-on"] == "clients" and not values["validation-share"]:
        raise ValueError(
            "evaluate-on = 'clients' needs examples to evaluate on: got validation-share = 0, "
            "expected above 0; set validation-share=0.1, say"
        )
    glue_task = str(values.pop("glue-task"))
    data = preset.data_of(glue_task)
    values["max-length"] = _max_length(values["max-length"], preset)
    model = _model(preset.model, str(values.pop("model")), str(values.pop("targets")))
    place = str(values.pop("data"))
    fields: dict[str, Any] = {key.replace("-", "_"): value for key, value in values.items()}
    for key in ("rank", "straggler_grace", "max_examples", "max_update_norm"):
        fields[key] = None if fields[key] == AUTO else fields[key]
    return Config(
        task=preset.task,
        model=model,
        data=data if place == AUTO else _data(data, place),
        glue_task=data.subset if preset.glue_tasks else "",
        num_clients=preset.run["num-clients"],
        **fields,
    )


def absolute_paths(run_config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """The same with every path absolute: other processes may have other working directories."""
    values = dict(run_config)
    for key in ("resume", "output-dir", "model", "data"):
        path = Path(str(values.get(key) or AUTO)).expanduser()
        named = key in ("resume", "output-dir") or path.is_dir()  # not an id of the hub
        if str(path) != AUTO and named:
            values[key] = str(path.absolute())
    return values


def _model(spec: ModelSpec, name: str, targets: str) -> ModelSpec:
    """The preset's model, or another one in its place."""
    if name != AUTO:
        spec = ModelSpec("hub", *_place("model", name))
    if targets != AUTO:
        ends = tuple(end.strip() for end in targets.split(","))
        if not all(ends):
            raise ValueError(
                f"targets = {targets!r}: expected ends of layers' names with commas between "
                "them, such as q_proj,v_proj; correct it"
            )
        spec = dataclasses.replace(spec, targets=ends)
    return spec


def _data(spec: DataSpec, place: str) -> DataSpec:
    """The preset's data from another place."""
    name, revision = _place("data", place)
    if spec.source != "hub":
        raise ValueError(
            f"data = {place!r}: the preset's examples come with the app, expected 'auto'; leave "
            "it out, or take a preset whose data set is on the hub"
        )
    return dataclasses.replace(spec, name=name, revision=revision)


def _place(key: str, text: str) -> tuple[str, str]:
    """(name, revision) of `name`, or `name@revision`; a folder has no revision."""
    if Path(text).expanduser().is_dir():
        return str(Path(text).expanduser()), ""
    name, _, revision = text.partition("@")
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or name.startswith((".", "~")):
        raise ValueError(
            f"{key} = {text!r}: found no such folder, and an id of the hub looks like org/name or "
            "org/name@revision; correct it"
        )
    return name, revision


def _max_length(value: Scalar, preset: Preset) -> int:
    if value == AUTO:
        return preset.max_length
    if not preset.max_length:
        raise ValueError(
            f"max-length = {value!r}: {preset.path} has no texts, expected 'auto'; leave it out"
        )
    return int(value)


def _check_replies(values: Mapping[str, Scalar]) -> None:
    least, clients = int(values["min-replies"]), int(values["clients-per-round"])
    if least > clients:
        raise ValueError(
            f"min-replies = {least}: got clients-per-round = {clients}, expected at least as many; "
            "lower the one or raise the other"
        )
    if values["robust"] != "none" and clients < 3:
        raise ValueError(
            f"robust = {values['robust']!r}: got clients-per-round = {clients}, expected at least "
            "3, since of two replies none outvotes the other; raise clients-per-round"
        )
    if values["robust"] != "none" and values["weighting"] != "uniform":
        raise ValueError(
            f"robust = {values['robust']!r}: got weighting = {values['weighting']!r}, expected "
            "'uniform', since a weight that a client claims is no more to be trusted than the "
            "rest; leave one of them out"
        )


def _check_method(values: Mapping[str, Scalar]) -> None:
    """Refuse options that do not go with the method."""
    frozen = [name for name, method in METHODS.items() if method.frozen_backbone]
    averaging = [name for name, method in METHODS.items() if method.averages]
    no_mean = "makes its next state otherwise than by a mean"
    for key, able, otherwise in (
        ("quantize", frozen, "changes pretrained weights, which few bits cannot hold"),
        ("server-optimizer", averaging, no_mean),
        ("robust", averaging, no_mean),
    ):
        if values[key] != "none" and values["method"] not in able:
            raise ValueError(
                f"{key} = {values[key]!r}: got method {values['method']!r}, which {otherwise}; "
                f"expected one of {', '.join(able)}; choose one, or set {key}=none"
            )


def _check_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if kind not in (AUTO, "cpu", "cuda", "mps") or (number and not number.isdigit()):
        raise ValueError(f"device = {device!r}: expected auto, cpu, cuda, cuda:N or mps; change it")
