"""Hold what the commands share: how one is offered, and the options of a run's engine."""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

from ravan_flwr.config.key import AUTO

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"
Option = tuple[tuple[str, ...], dict[str, Any]]


def option(*names: str, **how: Any) -> Option:
    """Describe an argument as argparse takes it."""
    return names, how


def offer(
    commands: Commands, name: str, run: Callable[[argparse.Namespace], None], about: str,
    *options: Option, note: str = "", epilog: str | None = None,
) -> argparse.ArgumentParser:  # fmt: skip
    """Offer a command with its arguments; `note` follows `about` in its own help."""
    description = f"{about[0].upper()}{about[1:]}. {note}".rstrip()
    parser = commands.add_parser(name, help=about, description=description, epilog=epilog)
    for names, how in options:
        parser.add_argument(*names, **how)
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
    """Raise ValueError for an option that the engine does nothing with."""
    per_gpu = parsed.clients_per_gpu
    if per_gpu is not None and parsed.engine != "flower":
        raise ValueError(
            f"--clients-per-gpu {per_gpu}: got --engine {parsed.engine} beside it, expected "
            "flower, whose clients are processes of their own; add --engine flower"
        )


def check_device(device: str) -> None:
    """Raise ValueError if this machine lacks the device, before anything else is imported."""
    if device not in (AUTO, "cpu"):
        from ravan_flwr.training.device import pick_device  # noqa: PLC0415 (PyTorch, half the wait)

        pick_device(device)
