"""Find and read presets, and replace their model or data set."""

import dataclasses
import os
import re
import shlex
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ravan_flwr.config.key import AUTO, did_you_mean
from ravan_flwr.specs import DataSpec, ModelSpec, Scalar, read_targets

if TYPE_CHECKING:
    from ravan_flwr.config.preset import Preset

_SUFFIXES = (".yaml", ".yml")


class PresetPath(str):
    """A preset's name that is the path of its file.

    Only a process of the user who named the file makes one (`with_preset_path`). A name that
    arrives by Flower is a plain text and selects a file of `conf/`. So a remote user cannot make a
    device or a server read other files.
    """

    __slots__ = ()


def with_preset_path(run_config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the run config with a `PresetPath` as its `preset`, if that is a file of the user.

    It is a path, or the name of a file in `conf/` of the working directory. The app's own presets
    come first, so no file hides one of them.
    """
    values = dict(run_config)
    name = values.get("preset")
    if isinstance(name, str) and _is_path(name):
        values["preset"] = PresetPath(Path(name).expanduser().absolute())
    elif name in preset_names(Path("conf")) and name not in preset_names():
        values["preset"] = PresetPath(Path("conf", f"{name}.yaml").absolute())
    return values


def preset_in_app(name: str, app: Path) -> str:
    """Return the name under which a bundle of the app folder has a preset."""
    if not isinstance(name, PresetPath):
        return name
    path = Path(name)
    if path.parent.resolve() != (app / "conf").resolve() or path.suffix != ".yaml":
        raise _not_in_app(name)
    return path.stem


def _is_path(name: str) -> bool:
    return name.endswith(_SUFFIXES) or "/" in name


def conf_folder() -> Path:
    """Return `conf/` of a checkout, an app bundle, or the package of an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "conf", package / "conf"):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"presets: found no folder conf/ beside or in {package}; expected the presets that "
        "came with ravan-flwr; install it again"
    )


def preset_names(folder: Path | None = None) -> list[str]:
    """Return the names of the presets in a folder, the app's own `conf/` by default."""
    return sorted(path.stem for path in (folder or conf_folder()).glob("*.yaml"))


def preset_file(name: str) -> Path:
    """Return the file of a preset; raise ValueError if there is none."""
    if isinstance(name, PresetPath):
        if not os.path.isfile(name):  # noqa: PTH113 (False for a name that is too long)
            meant = f"{name}.yaml"
            hint = f": did you mean {meant}?" if os.path.isfile(meant) else "; correct the path"  # noqa: PTH113
            raise ValueError(f"preset {str(name)!r}: found no such file{hint}")
        return Path(name)
    if name in preset_names():
        return conf_folder() / f"{name}.yaml"
    if _is_path(name):
        raise _not_in_app(name)
    here = [own for own in preset_names(Path("conf")) if own not in preset_names()]
    raise ValueError(
        f"preset {name!r} is unknown{did_you_mean(name, [*here, *preset_names()])} Expected one "
        f"of: {', '.join([*here, *preset_names()])} (the files of {conf_folder()}"
        + (" and of conf/ here" if here else "")
        + "), or the path of a file, such "
        f"as ./{name}.yaml; `ravan-flwr new` writes one for your own task"
    )


def _not_in_app(name: str) -> ValueError:
    """Return the error for the path of a preset where Flower's bundle of the app has to have it."""
    path, copy = Path(name), ""
    if path.parent != Path("conf") or path.suffix != ".yaml":  # it is not there yet
        target = f"conf/{path.stem}.yaml" if path.suffix == ".yml" else "conf/"
        copy = f"copy it there, `cp {shlex.quote(name)} {target}`, and "
    return ValueError(
        f"preset = {str(name)!r}: got the path of a file, but under Flower a preset is one of the "
        f"app's own files, in its folder conf/; {copy}set preset={path.stem}"
    )


def new_preset_path(name: str) -> Path:
    """Return the path of a new preset in `conf/` of the working directory.

    Raise ValueError if the name is not valid, or taken there or in `conf/` of this app.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name.endswith(_SUFFIXES):
        raise ValueError(
            f"NAME {name!r}: expected letters, digits, hyphens and underscores, such as "
            "my-task; it becomes conf/my-task.yaml"
        )
    path = Path.cwd() / "conf" / f"{name}.yaml"
    app_path = conf_folder() / f"{name}.yaml"
    for file in (path, app_path):
        if file.exists():
            raise ValueError(
                f"NAME {name!r}: there is {file} already, and nothing is overwritten; choose "
                "another name, or move the file away"
            )
    return path


def read_preset(name: str) -> "Preset":
    """Return the checked preset of that name, or of the file at a `PresetPath`."""
    path = preset_file(name)
    stat = path.stat()
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _read(path: Path, _version: tuple[int, ...]) -> "Preset":
    """Return a file's preset, cached by version: every message to a client reads it."""
    from ravan_flwr.config.preset import Preset  # noqa: PLC0415 (pydantic; no `--help` needs it)
    from ravan_flwr.config.yaml_file import read_yaml  # noqa: PLC0415

    content = read_yaml(path)
    try:
        return Preset.read(path, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def absolute_paths(run_config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the run config with absolute paths: processes may have other working directories."""
    values = dict(run_config)
    for key in ("resume", "output-dir", "model", "data", "devices"):
        if (value := values.get(key)) and isinstance(value, str) and value != AUTO:
            path = Path(value).expanduser()
            # A hub id or the name of a device profile stays as it is.
            exists = path.is_file() if key == "devices" else path.is_dir()
            if exists or key in ("resume", "output-dir"):
                values[key] = str(path.absolute())
    return values


def chosen_model(
    spec: ModelSpec, name: str, targets: str, models: Mapping[str, ModelSpec] | None = None
) -> ModelSpec:
    """Return the preset's model, another model of it, or any model, with the layers to adapt."""
    if name != AUTO:
        spec = (models or {}).get(name) or ModelSpec("hub", *parse_location("model", name))
    if targets != AUTO:
        spec = dataclasses.replace(spec, targets=read_targets(targets))
    return spec


def chosen_data(spec: DataSpec, location: str) -> DataSpec:
    """Return the preset's data, or data with the same columns and labels from another location."""
    if location == AUTO:
        return spec
    name, revision = parse_location("data", location)
    return dataclasses.replace(spec, source="hub", name=name, revision=revision)


def parse_location(key: str, text: str) -> tuple[str, str]:
    """Return (name, revision) of a folder, or of `name` or `name@revision` of the hub.

    A folder has no revision. Raise ValueError for any other text.
    """
    path = Path(text).expanduser()
    is_path = text.startswith((".", "/", "~"))
    if path.is_file() and (path.suffix or is_path):
        raise ValueError(
            f"{key} = {text!r}: got a file, expected a folder; move it into a folder of its own, "
            "and name that folder"
        )
    if path.is_dir():
        return str(path), ""
    if is_path:
        raise ValueError(
            f"{key} = {text!r}: found no such folder or file; correct the path, or name an id of "
            "the hub, org/name or org/name@revision"
        )
    name, _, revision = text.partition("@")
    parts = name.split("/")
    if len(parts) > 2 or not all(parts) or re.search(r"(?i)\.(csv|jsonl?|parquet)$", name):
        raise ValueError(
            f"{key} = {text!r}: found nothing there, and an id of the hub looks like org/name or "
            "org/name@revision; correct the path"
        )
    return name, revision
