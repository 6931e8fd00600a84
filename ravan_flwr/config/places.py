"""Put another model or data set in the place of a preset's."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from ravan_flwr.config.key import nearest
from ravan_flwr.config.keys import AUTO
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar


def absolute_paths(run_config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Make every path absolute: other processes may have other working directories."""
    values = dict(run_config)
    for key in ("resume", "output-dir", "model", "data"):
        if (value := values.get(key)) and isinstance(value, str) and value != AUTO:
            path = Path(value).expanduser()
            if key in ("resume", "output-dir") or path.is_dir():  # not an id of the hub
                values[key] = str(path.absolute())
    return values


def chosen_model(
    spec: ModelSpec, name: str, targets: str, others: Mapping[str, ModelSpec] | None = None
) -> ModelSpec:
    """Return the preset's model, one of its others, or any one, with the layers to adapt."""
    if name != AUTO:
        spec = _known(others or {}, name) or ModelSpec("hub", *_place("model", name))
    if targets != AUTO:
        spec = dataclasses.replace(spec, targets=targets_of(targets))
    return spec


def _known(others: Mapping[str, ModelSpec], name: str) -> ModelSpec | None:
    """Find a model that the preset names, by that name or by its place; None if it is another."""
    if name in others:
        return others[name]
    if "/" not in name and (near := nearest(name, others)) and not Path(name).is_dir():
        raise ValueError(
            f"model = {name!r}: did you mean {near!r}? Expected one of {', '.join(others)} of the "
            "preset, an id of the hub such as org/name, or a folder; correct it"
        )
    places = {f"{one.name}@{one.revision}" if one.revision else one.name: one
              for one in others.values()}  # fmt: skip
    return places.get(name)


def targets_of(text: str) -> tuple[str, ...]:
    """Split the ends of the names of the layers to adapt."""
    ends = tuple(end.strip() for end in text.split(","))
    if not all(ends):
        raise ValueError(
            f"targets = {text!r}: expected ends of layers' names with commas between them, such as "
            "q_proj,v_proj; correct it"
        )
    return ends


def chosen_data(spec: DataSpec, place: str) -> DataSpec:
    """Return the preset's data, or data with the same columns and labels from another place."""
    if place == AUTO:
        return spec
    name, revision = _place("data", place)
    return dataclasses.replace(spec, source="hub", name=name, revision=revision)


def _place(key: str, text: str) -> tuple[str, str]:
    """Split `name` or `name@revision` in (name, revision); a folder has no revision."""
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


def place_of_data(place: str) -> tuple[str, str]:
    """Split a folder, or an id of the hub, from its revision; ValueError for what is neither."""
    path = Path(place).expanduser()
    if path.is_file():
        raise ValueError(
            f"data {place}: got a file, expected a folder, which may hold it alone; move it: "
            f"mkdir data && mv {place} data/train{path.suffix}"
        )
    if path.is_dir():
        return str(path.resolve()), ""
    name, _, revision = place.partition("@")
    if place.startswith((".", "/", "~")) or len(name.split("/")) > 2:
        raise ValueError(
            f"data {place}: found no such folder; expected one, or an id of the hub such as "
            "org/name; correct it"
        )
    return name, revision
