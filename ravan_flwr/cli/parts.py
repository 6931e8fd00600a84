"""Hold what the commands share."""

import argparse
from typing import TypeAlias

Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def add_gpus(parser: argparse.ArgumentParser) -> None:
    """Offer how clients share GPUs."""
    parser.add_argument(
        "--clients-per-gpu",
        type=int,
        metavar="N",
        help="clients at a time on each GPU, 0 for a run on the CPU (default: as many as fit, "
        "by the plan's count of memory)",
    )
