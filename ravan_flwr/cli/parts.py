"""Shared parts of the commands: adding a command, and the options of a run's engine."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ravan_flwr.config.key import AUTO

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **kwargs: Any) -> Option:
    """Return the arguments of `ArgumentParser.add_argument`."""
    return names, kwargs


def add_command(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], about: str,
    *options: Option, note: str = "", epilog: str | None = None,
) -> argparse.ArgumentParser:  # fmt: skip
    """Add a command and its options; in the command's help, `note` follows `about`."""
    description = f"{about[0].upper()}{about[1:]}. {note}".rstrip()
    parser = commands.add_parser(name, help=about, description=description, epilog=epilog)
    for names, kwargs in options:
        parser.add_argument(*names, **kwargs)
    parser.set_defaults(command=run)
    return parser


# fmt: off
RUN = option("run", type=Path, metavar="RUN", help="a run directory")
ENGINE = (
    option("--engine", choices=("process", "flower"), default="process",
        help="process: in this process, and in workers where these save time; flower: `flwr run` "
        "in Flower's simulation runtime, with a SuperLink that ends with it (default: process)"),
    option("--clients-per-gpu", type=int, metavar="N",
        help="with --engine flower: clients at a time on each GPU (default: as many as fit, by the "
        "plan's count of memory)"),
)
# fmt: on


def check_engine(parsed: argparse.Namespace) -> None:
    """Raise ValueError for an option that the engine ignores."""
    per_gpu = parsed.clients_per_gpu
    if per_gpu is not None and parsed.engine != "flower":
        raise ValueError(
            f"--clients-per-gpu {per_gpu}: got --engine {parsed.engine} beside it, expected "
            "flower, whose clients are processes of their own; add --engine flower"
        )


def check_device(device: str) -> None:
    """Raise ValueError if this machine lacks the device, before anything else is imported."""
    if device not in (AUTO, "cpu"):
        from ravan_flwr.training.device import pick_device  # noqa: PLC0415 (PyTorch alone: half the import time)

        pick_device(device)
