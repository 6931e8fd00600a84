"""Read the configuration: run config and preset in, a frozen `Config` out.

Everything is checked here, before anything is loaded; below this module there are only
plain arguments.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

from ravan_flwr.config.checks import STEPS, check_steps, check_together, trains_backbone
from ravan_flwr.config.keys import AUTO, FROM_PRESET, KEYS, check_key
from ravan_flwr.config.places import chosen_data, chosen_model
from ravan_flwr.config.preset import Preset
from ravan_flwr.config.preset_fields import RUN
from ravan_flwr.config.presets import read_preset
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar
from ravan_flwr.tasks import TASKS

CLIP_OF_GRADIENTS = 1.0  # under privacy=example, where none is set
HELD_BACK = 0.2  # of a client's examples, where each has a model of its own


@dataclass(frozen=True)
class Config:
    """Hold a run's settings: every choice made, every value checked."""

    preset: str
    task: str
    model: ModelSpec
    data: DataSpec
    glue_task: str  # "" where there is none
    method: str
    seed: int
    # Of the preset; a federation may have another number. None: as the data says (natural).
    num_clients: int | None
    num_rounds: int
    clients_per_round: int
    max_bytes: float | None  # None: any number
    until_metric: float  # 0: hold all rounds
    local_steps: int | None  # None: local_epochs say how many
    local_epochs: float | None  # None: local_steps are for all clients
    batch_size: int
    micro_batch_size: int | None  # examples of a step at a time; None: all
    micro_batch_tokens: int | None  # tokens of a step at a time; None: all
    packing: bool
    batching: str
    learning_rate: float
    learning_rate_schedule: str
    final_learning_rate: float
    warm_up_rounds: int
    weight_decay: float
    max_gradient_norm: float  # 0: none
    proximal_mu: float
    weighting: str
    server_optimizer: str
    server_learning_rate: float
    server_momentum: float
    partition: str
    partition_alpha: float
    classes_per_client: int
    shards_per_client: int
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
    head_mean: str
    budgets: str
    classifier: str
    eval_every: int
    evaluate_samples: int  # answers to test examples that a person reads
    device: str
    processes: int | None  # None: as many as pay, where clients run in process
    precision: str
    max_length: int  # tokens of a text; 0 where there is none
    gradient_checkpointing: bool
    wire: str
    layer_form: str
    quantize: str
    backbone_dtype: str
    output_dir: str
    resume: str
    deliver: bool
    report: bool
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
    privacy: str
    epsilon: float | None  # None: no limit
    noise_multiplier: float | None  # None: by epsilon
    delta: float
    clip_norm: float | None  # None: it adapts
    noise_cohort: int | None  # None: of the clients that there are
    secure_aggregation: bool
    secure_minimum: int

    @property
    def noised_on_devices(self) -> bool:
        """Return whether devices add the noise, since they do not trust the server."""
        return self.privacy == "example" or (self.privacy == "client" and self.secure_aggregation)

    def steps_of(self, examples: int) -> int:
        """Count the optimiser steps of a client with so many examples, in each round.

        The last batch of a pass may be short, and is a step as well. Parts of a pass are rounded up
        to whole batches.
        """
        if self.local_steps is not None:
            return self.local_steps
        batches = -(-examples // self.batch_size)
        # 0.1 x 30 is a little more than 3 to a computer.
        return max(1, math.ceil((self.local_epochs or 1.0) * batches - 1e-6))

    def asked_of(self, there: int) -> int:
        """Count the clients of so many that a round asks to train, those in reserve included."""
        number = min(self.clients_per_round, there)
        # 1.1 x 10 is a little more than 11 to a computer.
        return min(number + math.ceil(number * (self.over_sample - 1) - 1e-9), there)

    def at_work_of(self, there: int) -> int:
        """Count the clients of so many that can be at work at the same time."""
        return there if self.evaluate_on == "clients" else self.asked_of(there)

    def as_dict(self) -> dict[str, Any]:
        """Return what `config.json` holds: plain JSON under the keys of the run config."""
        values = _kebab(dataclasses.asdict(self))
        plain: dict[str, Any] = json.loads(json.dumps(values))
        return plain


# What is known later, or has no limit.
_NONE_IF_AUTO = (
    "rank", "micro-batch-size", "micro-batch-tokens", "max-bytes", "processes", "straggler-grace",
    "max-examples", "max-update-norm", "epsilon", "noise-multiplier", "clip-norm", "noise-cohort",
)  # fmt: skip


def _kebab(values: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key.replace("_", "-"): _kebab(value) if isinstance(value, dict) else value
        for key, value in values.items()
    }


def read_config(run_config: Mapping[str, Scalar]) -> Config:
    """Check a run config, read its preset, and resolve every `"auto"`."""
    values = {key: check_key(key, run_config[key]) for key in run_config}
    for key, spec in KEYS.items():
        values.setdefault(key, spec.default)
    preset = read_preset(cast(str, values["preset"]))
    check_steps(values)
    if values["quantize"] == AUTO and trains_backbone(values):
        values["quantize"] = "none"
    said = STEPS if any(values[key] != AUTO for key in STEPS) else ()
    for key in FROM_PRESET.difference(said):
        if values[key] == AUTO:
            values[key] = preset.run[key]
    _resolve_ranks(values, preset)
    _resolve_rates(values, preset)
    _resolve_clients(values)
    if values["privacy"] == "example" and values["clip-norm"] == AUTO:
        values["clip-norm"] = CLIP_OF_GRADIENTS
    check_together(values)
    if values["secure-aggregation"]:  # a sum of fewer is not unmasked
        values["min-replies"] = max(int(values["min-replies"]), int(values["secure-minimum"]))
    _check_batching(values, preset, _max_length(values["max-length"], preset))
    _check_samples(values, preset)
    data = preset.data_of(str(values["glue-task"]))
    resolved: dict[str, Any] = values | {
        "preset": preset.name,
        "task": preset.task,
        "model": chosen_model(
            preset.model, str(values["model"]), str(values["targets"]), preset.other_models
        ),
        "data": _divided_by(chosen_data(data, str(values["data"])), values["partition-by"]),
        "glue-task": data.subset if preset.glue_tasks else "",
        "num-clients": _num_clients(values, preset),
        "max-length": _max_length(values["max-length"], preset),
    }
    del resolved["targets"], resolved["partition-by"]  # the model and the data have them
    for key in (*STEPS, *_NONE_IF_AUTO):
        if values[key] == AUTO:
            resolved[key] = None
    return Config(**{key.replace("-", "_"): value for key, value in resolved.items()})


def has_default_rate(run_config: Mapping[str, Scalar]) -> bool:
    """Tell whether neither the run config nor its preset says the learning rate."""
    if run_config.get("learning-rate", AUTO) != AUTO:
        return False
    preset, method = (run_config.get(key, KEYS[key].default) for key in ("preset", "method"))
    return method not in read_preset(cast(str, preset)).rates


def _resolve_ranks(values: dict[str, Scalar], preset: Preset) -> None:
    """Fill in the budget and the rank, as far as the preset says them."""
    budget, method = str(values["parameter-budget"]), str(values["method"])
    # The preset's ranks are those of its own heads, model and targets, within its own budget.
    own = values["heads"] == preset.run["heads"] or "heads" in METHODS[method].ignored
    own = own and all(values[key] == AUTO for key in ("model", "targets", "lora-rank"))
    if values["rank"] == AUTO and own:
        values["rank"] = preset.ranks[budget].get(method, AUTO)
    if values["lora-rank"] == AUTO:
        values["lora-rank"] = preset.lora_rank[budget]


def _resolve_rates(values: dict[str, Scalar], preset: Preset) -> None:
    """Fill in the learning rates of clients, calibration and server."""
    if values["learning-rate"] == AUTO:
        values["learning-rate"] = preset.learning_rate(str(values["method"]), values)
    if values["final-learning-rate"] == AUTO:
        values["final-learning-rate"] = float(values["learning-rate"]) / 50
    if values["calibration-learning-rate"] == AUTO:
        values["calibration-learning-rate"] = preset.learning_rate("full", values)
    if values["server-learning-rate"] == AUTO:
        values["server-learning-rate"] = 0.01 if values["server-optimizer"] == "adam" else 1.0


def _divided_by(data: DataSpec, column: Scalar) -> DataSpec:
    return data if column == AUTO else dataclasses.replace(data, partition_by=str(column))


def _num_clients(values: Mapping[str, Scalar], preset: Preset) -> int | None:
    """Return how many clients the preset says, None if the data says it."""
    said: int | None = preset.run["num-clients"]
    if values["partition"] == "natural":
        return said if preset.run["partition"] == "natural" else None
    return int(RUN["num-clients"]) if said is None else said


def _resolve_clients(values: dict[str, Scalar]) -> None:
    """Fill in who trains and who evaluates, as the method needs it."""
    method = METHODS[str(values["method"])]
    if method.everyone:
        values["clients-per-round"] = int(KEYS["clients-per-round"].high)  # as many as there are
    if method.pools:
        values["clients-per-round"] = 1
    if values["evaluate-on"] == AUTO:
        values["evaluate-on"] = "clients" if method.personalised else "server"
    if values["validation-share"] == AUTO:
        values["validation-share"] = HELD_BACK if method.personalised else 0.0


def _check_batching(values: Mapping[str, Scalar], preset: Preset, max_length: int) -> None:
    """Refuse ways to make batches of texts where there are none, or none that can go on."""
    for key, without in (("batching", "random"), ("micro-batch-tokens", AUTO)):
        if values[key] != without and not preset.max_length:
            raise ValueError(
                f"{key} = {values[key]!r}: {preset.path} has no texts, expected {without!r}, since "
                "all its examples are of one size; leave it out"
            )
    if values["packing"] and not TASKS[preset.task].packs:
        raise ValueError(
            f"packing = true: {preset.path} has task {preset.task!r}, expected 'causal', whose "
            "texts can lie side by side; leave it out"
        )
    tokens = values["micro-batch-tokens"]
    if tokens != AUTO and int(tokens) < max_length:
        raise ValueError(
            f"micro-batch-tokens = {tokens}: got max-length = {max_length}, expected at least as "
            "many, since a text may have that many; raise the one or lower the other"
        )


def _check_samples(values: Mapping[str, Scalar], preset: Preset) -> None:
    """Refuse answers to read from a model that writes none, or where the server has no examples."""
    number = values["evaluate-samples"]
    if not number:
        return
    writing = [name for name, kind in TASKS.items() if kind.target_length]
    if preset.task not in writing:
        raise ValueError(
            f"evaluate-samples = {number}: the task of {preset.path} is {preset.task!r}, which "
            f"writes no text, expected one of {', '.join(writing)}; leave it out"
        )
    if values["evaluate-on"] == "clients":
        raise ValueError(
            f"evaluate-samples = {number}: got evaluate-on = 'clients', whose texts stay with "
            "them, expected 'server', whose test examples are answered; leave one of them out"
        )


def _max_length(value: Scalar, preset: Preset) -> int:
    if value == AUTO:
        return preset.max_length
    if not preset.max_length:
        raise ValueError(
            f"max-length = {value!r}: {preset.path} has no texts, expected 'auto'; leave it out"
        )
    return int(value)
