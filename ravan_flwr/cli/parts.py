"""Hold what the commands share."""

import argparse
from typing import TypeAlias

from ravan_flwr.config.keys import AUTO

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_engine(parser: argparse.ArgumentParser) -> None:
    """Offer what a run's clients are, and how they share GPUs."""
    parser.add_argument(
        "--engine",
        choices=("process", "flower"),
        default="process",
        help="process: clients in this process, and in others of its own where these save time; "
        "flower: `flwr run` in Flower's simulation runtime, with a SuperLink that ends with it "
        "(default: process)",
    )
    parser.add_argument(
        "--clients-per-gpu",
        type=int,
        metavar="N",
        help="with --engine flower: clients at a time on each GPU, 0 for a run on the CPU "
        "(default: as many as fit, by the plan's count of memory)",
    )


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
