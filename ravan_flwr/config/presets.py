"""Find and read presets: files of `conf/` by their name, any file by its path."""

import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

from ravan_flwr.config.key import did_you_mean
from ravan_flwr.specs import Scalar

if TYPE_CHECKING:
    from ravan_flwr.config.preset import Preset

_SUFFIXES = (".yaml", ".yml")


class PresetPath(str):
    """Name a preset by the path of its file.

    Only a process that reads the file for the person who named it makes one (`own_preset`). What
    Flower brings to a device or a server is a plain text, which chooses among the files of `conf/`,
    so that nobody else can have a device read a file.
    """

    __slots__ = ()


def own_preset(run_config: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Let the run config's `preset` be the path of a file, if it looks like one."""
    values = dict(run_config)
    name = values.get("preset")
    if isinstance(name, str) and _is_path(name):
        values["preset"] = PresetPath(Path(name).expanduser().absolute())
    return values


def _is_path(name: str) -> bool:
    return name.endswith(_SUFFIXES) or "/" in name


def conf_folder() -> Path:
    """Find `conf/` of a checkout or an app bundle, or inside the package of an installed wheel."""
    package = Path(__file__).resolve().parent.parent
    for folder in (package.parent / "conf", package / "conf"):
        if folder.is_dir():
            return folder
    raise ValueError(
        f"presets: found no folder conf/ beside or in {package}; expected the presets that "
        "came with ravan-flwr; install it again"
    )


def preset_names() -> list[str]:
    """List the presets of `conf/`."""
    return sorted(path.stem for path in conf_folder().glob("*.yaml"))


def preset_file(name: str) -> Path:
    """Find the file of a preset."""
    if isinstance(name, PresetPath):
        if not Path(name).is_file():
            raise ValueError(f"preset {str(name)!r}: found no such file; correct the path")
        return Path(name)
    if name in preset_names():
        return conf_folder() / f"{name}.yaml"
    if _is_path(name):
        raise ValueError(
            f"preset = {name!r}: got the path of a file, but under Flower a preset is one of the "
            f"app's own files; copy it there, `cp {name} conf/`, and set "
            f"preset={Path(name).stem}"
        )
    raise ValueError(
        f"preset {name!r} is unknown{did_you_mean(name, preset_names())} Expected one of: "
        f"{', '.join(preset_names())} (the files of {conf_folder()}), or the path of a file, such "
        f"as ./{name}.yaml; `ravan-flwr new` writes one for your own task"
    )


def new_file(name: str) -> Path:
    """Choose where to write a preset: in `conf/` of this app, or of the working directory."""
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}", name) or name.endswith(_SUFFIXES):
        raise ValueError(
            f"NAME {name!r}: expected letters, digits, hyphens and underscores, such as "
            "my-task; it becomes conf/my-task.yaml"
        )
    here = Path.cwd() / "conf"
    folder = conf_folder() if conf_folder().parent == Path.cwd() else here
    path = folder / f"{name}.yaml"
    taken = conf_folder() / f"{name}.yaml"
    for found in (path, taken):
        refuse_if_there(name, found)
    return path


def refuse_if_there(name: str, path: Path) -> None:
    """Raise ValueError if there is such a file."""
    if path.exists():
        raise ValueError(
            f"NAME {name!r}: there is {path} already, and nothing is overwritten; choose another "
            "name, or move the file away"
        )


def read_preset(name: str) -> "Preset":
    """Read and check the preset of that name, or the file at a `PresetPath`."""
    path = preset_file(name)
    stat = path.stat()
    return _read(path, (stat.st_ino, stat.st_size, stat.st_mtime_ns))


@lru_cache(maxsize=4)
def _read(path: Path, _version: tuple[int, ...]) -> "Preset":
    """Read a file once for each of its versions: every message to a client asks for it."""
    from ravan_flwr.config.preset import Preset  # noqa: PLC0415 (pydantic; no `--help` needs it)
    from ravan_flwr.config.yaml_file import read_yaml  # noqa: PLC0415

    content = read_yaml(path)
    try:
        return Preset.read(path, content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
