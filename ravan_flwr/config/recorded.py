"""Read the configuration of an earlier run from its `config.json`."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import Config
from ravan_flwr.specs import DataSpec, ModelSpec


def recorded_config(content: Mapping[str, Any], where: str) -> Config:
    """Turn what a run's `config.json` holds into its `Config`; `Config.as_dict` is the inverse."""
    values = _snake(in_todays_values(content))
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


def in_todays_values(content: Mapping[str, Any]) -> dict[str, Any]:
    """Replace the "yes" and "no" of earlier versions, and add what they did not say of the data."""
    booleans = {name for name, key in KEYS.items() if key.kind is bool}
    values = {
        name: KEYS[name].converted(value) if name in booleans else value
        for name, value in content.items()
    }
    if isinstance(data := values.get("data"), dict):
        values["data"] = {"test-share": DataSpec.test_share, **data}
    return values


def _snake(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key.replace("-", "_"): _tuples(value) for key, value in values.items()}


def _tuples(value: Any) -> Any:
    """Turn lists into tuples: JSON has lists only."""
    return tuple(map(_tuples, value)) if isinstance(value, list) else value
