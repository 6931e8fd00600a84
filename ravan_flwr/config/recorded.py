"""Read the configuration of an earlier run from its `config.json`."""

import dataclasses
from collections.abc import Mapping, Set
from typing import Any

from ravan_flwr.config.keys import AUTO, FREE_ON_RESUME, KEYS
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.specs import DataSpec, ModelSpec, QuestionSpec, Scalar

# These may change in a run that goes on, and are better what they were.
WAITING = {"device", "round-timeout", "straggler-grace"}
# What runs did before these keys were there, whose default is "auto" now.
EARLIER: dict[str, Scalar] = {
    "evaluate-on": "server", "validation-share": 0.0, "learning-rate-schedule": "constant",
    "precision": "float32", "gradient-checkpointing": False, "quantize": "none", "lora-scale": 1.0,
}  # fmt: skip


def recorded_config(content: Mapping[str, Any], where: str) -> Config:
    """Turn what a run's `config.json` holds into its `Config`; `Config.as_dict` is the inverse."""
    # What an earlier version had no key for was as the key's default.
    none = ("processes", "micro-batch-size", "micro-batch-tokens", "max-bytes", "max-examples")
    later: dict[str, Any] = dict.fromkeys([*none, "straggler-grace"])
    later |= {
        name: key.default
        for name, key in KEYS.items()
        if key.default != AUTO or AUTO in key.choices  # others are resolved, by preset or method
    } | EARLIER
    known = in_todays_values(content)
    if isinstance(rate := known.get("learning-rate"), float):
        later |= {"final-learning-rate": rate / 50}
    values = _snake(later | known)
    fields = {field.name for field in dataclasses.fields(Config)}
    if values.keys() != fields:
        different = sorted(key.replace("_", "-") for key in values.keys() ^ fields)
        raise ValueError(
            f"{where}: its config.json lacks or has too many of {different}, expected the fields "
            "of this version; use the version of ravan-flwr that made the run"
        )
    values["model"] = ModelSpec(**_snake(values["model"]))
    values["data"] = _data_of(_snake(values["data"]))
    return Config(**values)


def _data_of(data: dict[str, Any]) -> DataSpec:
    if data["questions"]:
        data["questions"] = QuestionSpec(**_snake(data["questions"]))
    return DataSpec(**data)


_SECOND = ("model", "data", "learning-rate")  # by which others are settled, but for the first few


def settings_of(
    content: Mapping[str, Any],
    where: str,
    free: Set[str] = FREE_ON_RESUME - WAITING | {"num-clients"},
    preset: Mapping[str, Scalar] | None = None,
) -> dict[str, Scalar]:
    """Find a run config that gives what a run's `config.json` holds, but for what is `free`.

    `preset` names the preset where it is no file of conf/. ValueError where today's presets do not
    give it.
    """
    recorded = recorded_config(content, where).as_dict()  # checked
    if recorded["secure-aggregation"] and recorded["min-replies"] == recorded["secure-minimum"]:
        free = free | {"min-replies"}  # it follows from the other
    settings: dict[str, Scalar] = dict(preset or {})
    # What is set first decides what other keys are where they are "auto".
    for keys in (("preset", "method", "seed", "glue-task"), _SECOND, KEYS, KEYS):
        now = read_config(settings).as_dict()
        for key in keys:
            if key in _different(recorded, now, free):
                settings |= _setting(key, recorded[key], now[key])
    if left := _different(recorded, read_config(settings).as_dict(), free):
        raise ValueError(
            f"{where}: its config.json has other values of {left} than today's preset "
            f"{recorded['preset']!r} gives; use the presets and the version of ravan-flwr that "
            "made the run"
        )
    return settings


def _different(recorded: Mapping[str, Any], now: Mapping[str, Any], free: Set[str]) -> list[str]:
    """List the keys that have other values now, of those that are not free."""
    before = dict(recorded)
    if not now["data"]["labels"]:  # the data tells them once more
        before["data"] = before["data"] | {"labels": []}
    return [key for key in now if key not in free and now[key] != before.get(key, now[key])]


def _setting(key: str, value: Any, now: Any) -> dict[str, Scalar]:
    """Write a recorded value as a setting, in place of the value that the key has now."""
    if key not in ("model", "data"):
        return {key: AUTO if value is None else value}
    settings: dict[str, Scalar] = {}
    if any(value[name] != now[name] for name in ("source", "name", "revision")):
        revision = value["revision"]
        settings[key] = value["name"] + (f"@{revision}" if revision else "")
    if key == "data" and value["partition-by"] != now["partition-by"]:
        settings["partition-by"] = value["partition-by"]
    if key == "model" and value["targets"] != now["targets"]:
        settings["targets"] = ",".join(value["targets"])
    return settings


# What the first version did not say of the data.
_LATER = ("test_share", "prompts", "chat_template", "overlong", "loss_on", "questions")


def in_todays_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the "yes" and "no" of earlier versions, and add what they did not say of the data."""
    booleans = {name for name, key in KEYS.items() if key.kind is bool}
    values = {
        name: KEYS[name].converted(value) if name in booleans else value
        for name, value in content.items()
    }
    if isinstance(data := values.get("data"), dict):
        # A field that an earlier version did not know was as its default is.
        known = {f.name: f.default for f in dataclasses.fields(DataSpec)}
        later = {n.replace("_", "-"): known[n] for n in _LATER}
        values["data"] = later | data
    if "local-steps" in values:  # what there was no key for, and what had no effect
        values = {"local-epochs": None, "classes-per-client": 2, "shards-per-client": 2, **values}
    return values


def _snake(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _tuples(value) for key, value in values.items()}


def _tuples(value: Any) -> Any:
    """Turn lists into tuples: JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
