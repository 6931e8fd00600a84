"""Check a command as its program would, and printed code as its reader would.

CHECKS has a function for each program and READERS one for each language. Both raise an error for
what the program or reader refuses. None runs anything.
"""

import ast
import functools
import json
import os
import re
import subprocess
import textwrap
import tomllib
from pathlib import Path
from typing import Any

import typer
import yaml
from flwr.common.config import fuse_dicts, parse_config_args
from flwr.supercore.cli.flower_superexec import _parse_args as _parse_args_superexec
from flwr.supercore.utils import simulation_config_from_json
from flwr.superlink.cli.flower_superlink import _parse_args_run_superlink
from flwr.supernode.cli.flower_supernode import _parse_args_run_supernode

from ravan_flwr.cli import _parser
from ravan_flwr.config.keys import check_key, read_settings
from ravan_flwr.config.node_config import read_node
from ravan_flwr.config.preset import Preset
from ravan_flwr.config.presets import preset_names
from ravan_flwr.config.run_config import read_config
from ravan_flwr.lab.spec import MACHINE_KEYS, read_study
from ravan_flwr.simulated_time.devices import read_devices
from tests.support import ROOT
from tests.support.printed import Block, commands

PARSERS = {
    "flower-superexec": _parse_args_superexec,
    "flower-superlink": _parse_args_run_superlink,
    "flower-supernode": _parse_args_run_supernode,
}


def check_settings(settings: dict[str, Any]) -> None:
    """Read settings, without files that only a reader's machine has."""
    files = ("model", "data", "resume")
    known = {key: value for key, value in settings.items() if key not in files}
    if known.get("preset", "digits-vit") not in preset_names():
        assert re.search(r"[./]|^mine$", known.pop("preset")), "expected a preset of conf/"
    read_config(known)


def check_ours(words: list[str]) -> None:
    if words[-1] in ("--version", "--help"):
        return
    parsed, unknown = _parser().parse_known_args(words[1:])
    assert not [word for word in unknown if word.startswith("-")]
    if "settings" in parsed:
        settings, _ = read_settings([*parsed.settings, *unknown])
        if "file" not in parsed:
            check_settings(settings)
        elif parsed.file.parts[0] == "conf":  # test_study.py reads each of them
            assert (ROOT / parsed.file).is_file()
            assert all(check_key(key, value) for key, value in settings.items())
            assert settings.keys() <= set(MACHINE_KEYS)
    if config := getattr(parsed, "node_config", None):
        read_node(parse_config_args([config]))


def check_flwr(words: list[str]) -> None:
    """Parse by Flower's own command line; compare the settings with the app's defaults."""
    from flwr.cli.app import app as cli  # importing it prints warnings

    command: Any = typer.main.get_command(cli)
    context = command.make_context("flwr", words[1:])
    while isinstance(command, typer.core.TyperGroup):
        rest = [*context._protected_args, *context.args]
        name, command, rest = command.resolve_command(context, rest)
        context = command.make_context(name, rest, parent=context)
    if "run_config_overrides" not in context.params:
        return
    folder = ROOT / str(context.params["app"]).removeprefix("/app")
    project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    settings = parse_config_args(context.params["run_config_overrides"])
    fuse_dicts(project["tool"]["flwr"]["app"]["config"], settings)
    if folder == ROOT:
        check_settings(settings)
    federation = parse_config_args(context.params["federation_config_overrides"])
    simulation_config_from_json({key.replace("-", "_"): x for key, x in federation.items()})


def check_flower(words: list[str]) -> None:
    parsed = PARSERS[words[0]]().parse_args([word for word in words[1:] if word != "..."])
    if config := getattr(parsed, "node_config", None):
        read_node(parse_config_args([config]))


@functools.cache
def commands_of_make(*words: str) -> list[list[str]]:
    """Return the commands of a target's recipe, which `make --dry-run` prints."""
    outer = ("MAKEFLAGS", "MFLAGS")  # if the tests run under make with settings
    environment = {name: value for name, value in os.environ.items() if name not in outer}
    # Without the installation, which is due in a checkout whose pyproject.toml is newer than .venv.
    command = ["make", "--dry-run", "--old-file=.venv/.installed", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [words for _, words in commands(Block("Makefile", 1, "", done.stdout))]


def check_make(words: list[str]) -> None:
    recipe = commands_of_make(*words[1:])
    assert recipe, f"{words}: make runs nothing"
    for each in recipe:
        if each[0] in CHECKS:
            CHECKS[each[0]](each)


OTHER_MODULES = [["-m", name] for name in ("venv", "zipfile", "mkdocs")]


def check_python(words: list[str]) -> None:
    """Find the module or file, and the options in its text; find the files of pytest."""
    words = ["python", "-m", *words] if words[0] == "pytest" else words
    first, *rest = words[2:] if words[1] == "-m" else words[1:]
    if first == "-c":
        ast.parse(rest[0])
    elif first == "pip":
        check_pip(rest)
    elif first == "pytest":
        assert all((ROOT / word).exists() for word in rest if word.startswith("tests"))
    elif first not in ("eval.py", "main.py") and words[1:3] not in OTHER_MODULES:
        name = first.removeprefix("/opt/ravan-flwr/")
        name = name.replace(".", "/") + ".py" if words[1] == "-m" else name
        source = (ROOT / name).read_text(encoding="utf-8")
        for word in rest:
            assert word[:2] != "--" or f'"{word}"' in source, f"{name} has no option {word}"


def check_pip(words: list[str]) -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(extras.split(",")) <= project["optional-dependencies"].keys(), extras


CHECKS = {
    "ravan-flwr": check_ours, "flwr": check_flwr, **dict.fromkeys(PARSERS, check_flower),
    "make": check_make, "python": check_python, "python3": check_python, "pytest": check_python,
    "pip": check_pip,
}  # fmt: skip


def check_yaml(text: str, folder: Path) -> None:
    """Read a study, devices, or a preset, of which a page may print only a part."""
    content, path = yaml.safe_load(text), folder / "printed.yaml"
    path.write_text(text)
    if isinstance(content, list):
        read_devices(path, 4)
    elif "tables" in content:
        read_study(path)
    else:
        whole: dict[str, Any] = {"task": "text", "model": {"name": "m"}, "data": "d"}
        if "completion" in str(content.get("data")):
            whole["task"] = "causal"
        Preset.read(path, whole | content)


READERS = {
    "python": lambda text, folder: ast.parse(textwrap.dedent(text)), "yaml": check_yaml,
    "toml": lambda text, folder: tomllib.loads(text),
    "json": lambda text, folder: [json.loads(part) for part in re.split(r"\n(?={)", text)],
}  # fmt: skip
