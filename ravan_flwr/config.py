"""The one reader of the configuration: run config and preset in, a frozen `Config` out.

Everything is checked here, before anything is loaded; below this module there are only
plain arguments.
"""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ravan_flwr.keys import AUTO, KEYS, Scalar, check_key
from ravan_flwr.preset import FROM_PRESET, DataSpec, ModelSpec, Preset


@dataclass(frozen=True)
class Config:
    """A run, resolved: every choice made, every value checked."""

    preset: str
    task: str
    model: ModelSpec
    data: DataSpec
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
    output_dir: str
    resume: str
    report: str
    tracking: str
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
    return {key.replace("-", "_"): value for key, value in values.items()}


def read_config(run_config: Mapping[str, Scalar]) -> Config:
    """Check a run config, read its preset, and resolve every `"auto"`."""
    values = {key: check_key(key, run_config[key]) for key in run_config}
    for key, spec in KEYS.items():
        values.setdefault(key, spec.default)

    preset = Preset.read(str(values["preset"]))
    for key in FROM_PRESET:
        if values[key] == AUTO:
            values[key] = preset.run[key]
    if values["learning-rate"] == AUTO:
        method, classifier = str(values["method"]), str(values["classifier"])
        values["learning-rate"] = preset.default_learning_rate(method, classifier)
    if values["calibration-learning-rate"] == AUTO:
        rates = preset.learning_rate.get("full", {})
        values["calibration-learning-rate"] = rates.get(
            str(values["classifier"]), values["learning-rate"]
        )
    if values["server-learning-rate"] == AUTO:
        values["server-learning-rate"] = 0.01 if values["server-optimizer"] == "adam" else 1.0
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
        num_clients=preset.run["num-clients"],
        **fields,
    )


def _check_device(device: str) -> None:
    kind, _, number = device.partition(":")
    if kind not in (AUTO, "cpu", "cuda", "mps") or (number and not number.isdigit()):
        raise ValueError(f"device = {device!r}: expected auto, cpu, cuda, cuda:N or mps; change it")
