"""Make a frozen `Config` from a run config and its preset, or from a run's `config.json`.

All settings are checked here, before anything is loaded. Modules below this one take plain
arguments.
"""

import dataclasses
from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any, cast, get_args

from ravan_flwr.config.checks import check_together, trains_backbone
from ravan_flwr.config.key import AUTO, check_choice
from ravan_flwr.config.keys import KEYS, LIMITS, RUN, Config, check_key, read_limits
from ravan_flwr.config.presets import chosen_data, chosen_model, read_preset
from ravan_flwr.files import first_error
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import MAX_MASKED_CLIENTS, DataSpec, Scalar
from ravan_flwr.tasks import TASKS

if TYPE_CHECKING:
    from ravan_flwr.config.preset import Preset

__all__ = ["Config", "has_default_rate", "read_config", "recorded_config"]

GRADIENT_CLIP_NORM = 1.0  # default under privacy=example
VALIDATION_SHARE = 0.2  # default fraction of a client's examples, where clients evaluate
# Keys whose "auto" becomes None: the value is known later, or there is no limit.
_NONE_IF_AUTO = [
    field.name.replace("_", "-") for field in dataclasses.fields(Config)
    if "key" in field.metadata and type(None) in get_args(field.type)
]  # fmt: skip


def read_config(run_config: Mapping[str, Scalar]) -> Config:
    """Return the checked `Config` of a run config and its preset, with every `"auto"` resolved.

    Results are cached. A preset's file is read again after a change.
    """
    settings = {key: check_key(key, value) for key, value in run_config.items()}
    preset = cast(str, settings.get("preset", KEYS["preset"].default))
    return _read(tuple(settings.items()), read_preset(preset))


@lru_cache(maxsize=64)
def _read(settings: tuple[tuple[str, Scalar], ...], preset: "Preset") -> Config:
    values = {key: spec.default for key, spec in (KEYS | LIMITS).items()} | dict(settings)
    values |= read_limits(str(values.pop("limits")))
    not_from_preset = {"backbone-dtype"} if trains_backbone(values) else set()
    for key in preset.run.keys() - {"num-clients"} - not_from_preset:
        if values[key] == AUTO:
            values[key] = preset.run[key]
    _resolve(values, preset)
    check_together(values)
    _check_task(values, preset)
    if values["secure-aggregation"]:  # a sum of fewer clients is not unmasked
        values["min-replies"] = max(int(values["min-replies"]), int(values["secure-minimum"]))
    data, steps = preset.choose_data(str(values["glue-task"])), values["local-steps"]
    epochs = KEYS["local-steps"].parse("local-steps", steps) if isinstance(steps, str) else {}
    resolved: dict[str, Any] = values | {
        "preset": preset.name,
        "task": preset.task,
        "model": chosen_model(
            preset.model, str(values["model"]), str(values["targets"]), preset.other_models
        ),
        "data": _partitioned(chosen_data(data, str(values["data"])), str(values["partition"])),
        "glue-task": data.subset if preset.glue_tasks else "",
        "num-clients": _num_clients(values, preset),
        "local-steps": None if epochs else steps,
        "local-epochs": epochs.get("number"),
    }
    for key in _NONE_IF_AUTO:
        if values[key] == AUTO:
            resolved[key] = None
    return Config(**_snake(resolved))


def has_default_rate(run_config: Mapping[str, Scalar]) -> bool:
    """Return whether neither the run config nor its preset sets the learning rate."""
    if run_config.get("learning-rate", AUTO) != AUTO:
        return False
    preset, method = (run_config.get(key, KEYS[key].default) for key in ("preset", "method"))
    return method not in read_preset(cast(str, preset)).rates


def _resolve(values: dict[str, Scalar], preset: "Preset") -> None:
    """Set, in place, the values that follow from the preset and the method."""
    name, lora_rank = str(values["method"]), values["lora-rank"]
    budget = str(lora_rank) if lora_rank in preset.lora_rank else "lower"
    method, of_budget = METHODS[name], values | {"lora-rank": budget}
    # The preset's ranks apply only to its own heads, model, targets and parameter budget.
    has_rank = values["heads"] == preset.run["heads"] or "heads" in method.ignored
    has_rank = has_rank and values["model"] == values["targets"] == AUTO
    has_rank = has_rank and isinstance(lora_rank, str)
    values["lora-rank"] = preset.lora_rank[budget] if isinstance(lora_rank, str) else lora_rank
    # Under secure aggregation clients would report their metrics without masks.
    on_server = method.serves and (not method.personalised or bool(values["secure-aggregation"]))
    on_clients = (
        not on_server if values["evaluate-on"] == AUTO else (values["evaluate-on"] == "clients")
    )
    defaults: dict[str, Scalar] = {
        "rank": preset.ranks[budget].get(name, AUTO) if has_rank else AUTO,
        "evaluate-on": "clients" if on_clients else "server",
        "validation-share": VALIDATION_SHARE if on_clients else 0.0,
        "max-length": preset.max_length,
    }
    if values["learning-rate"] == AUTO:
        defaults["learning-rate"] = preset.learning_rate(name, of_budget)
    if values["calibration-learning-rate"] == AUTO:
        defaults["calibration-learning-rate"] = preset.learning_rate("full", of_budget)
    if values["privacy"] == "example":
        defaults["clip-norm"] = GRADIENT_CLIP_NORM
    if values["max-length"] != AUTO and not preset.max_length:
        raise ValueError(
            f"max-length = {values['max-length']!r}: {preset.path} has no texts, expected 'auto'; "
            "leave it out"
        )
    values.update({key: value for key, value in defaults.items() if values[key] == AUTO})
    if method.all_clients:
        # No round has more clients than there are.
        max_clients = (
            MAX_MASKED_CLIENTS if values["secure-aggregation"] else KEYS["clients-per-round"].high
        )
        values["clients-per-round"] = int(max_clients)
    if "weighting" in method.ignores and values["weighting"] == "examples":
        values["weighting"] = "uniform"
    if method.pools:
        values["clients-per-round"] = 1


def _partitioned(data: DataSpec, partition: str) -> DataSpec:
    column = KEYS["partition"].parse("partition", partition).get("column")
    return dataclasses.replace(data, partition_by=str(column)) if column else data


def _num_clients(values: Mapping[str, Scalar], preset: "Preset") -> int | None:
    """Return the preset's number of clients, or None if the data determine it."""
    number: int | None = preset.run["num-clients"]
    if str(values["partition"]).startswith("natural"):
        return number if str(preset.run["partition"]).startswith("natural") else None
    return int(RUN["num-clients"]) if number is None else number


def _check_task(values: Mapping[str, Scalar], preset: "Preset") -> None:
    """Raise ValueError for settings that the task does not support."""
    name = preset.task
    if values["batching"] != "random" and not preset.max_length:
        raise ValueError(
            f"batching = {values['batching']!r}: {preset.path} has no texts, expected 'random', "
            "since all images have one size; leave it out"
        )
    if values["batching"] == "packed" and not TASKS[name].packs:
        raise ValueError(
            f"batching = 'packed': {preset.path} has task {name!r}, expected 'causal', whose texts "
            "can share a row; leave it out"
        )
    if TASKS[name].texts > 1 and values["privacy"] == "example":
        raise ValueError(
            f"privacy = 'example': got task {name!r}, whose examples are {TASKS[name].texts} texts "
            "each, but gradients are computed by text; expected another task, or privacy=client; "
            "set that"
        )
    if TASKS[name].has_reference and trains_backbone(values):
        frozen = ", ".join(name for name, method in METHODS.items() if method.frozen_backbone)
        key, expected = "method", f"one of {frozen}"
        if METHODS[str(values["method"])].frozen_backbone:
            key, expected = "init", "another init"
        raise ValueError(
            f"{key} = {values[key]!r}: it changes pretrained weights, but task {name!r} compares "
            f"with the pretrained network; expected {expected}; set that"
        )


def recorded_config(content: Mapping[str, Any], where: str) -> Config:
    """Return the `Config` in the content of a run's `config.json`, as `Config.as_dict` wrote it."""
    from pydantic import TypeAdapter, ValidationError  # noqa: PLC0415 (`--help` needs neither)

    values = _snake(content)
    fields = {field.name for field in dataclasses.fields(Config)}
    if values.keys() != fields:
        different = sorted(key.replace("_", "-") for key in values.keys() ^ fields)
        raise ValueError(
            f"{where}: its config.json lacks, or has in excess, {different}, expected the fields "
            "of this version; use the version of ravan-flwr that made the run"
        )
    values |= {key: _snake(values[key]) for key in _PARTS if isinstance(values[key], dict)}
    try:
        for key, spec in (KEYS | LIMITS).items():
            # None, or a zero without meaning such as `max-length` of images, is not checked.
            if key not in _PARTS and (value := content.get(key)):
                spec.checked(key, value)
        check_choice("task", content["task"], TASKS)
        return TypeAdapter(Config).validate_python(values)
    except ValueError as error:
        wrong = first_error(error) if isinstance(error, ValidationError) else error
        raise ValueError(
            f"{where}: its config.json is damaged: {wrong}; expected what the run wrote; restore it"
        ) from None


_PARTS = {"model", "data"}


def _snake(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the mapping with keys as names of fields, and JSON's lists as tuples."""
    return {key.replace("-", "_"): _tuples(value) for key, value in values.items()}


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
