"""Commands that run the app many times."""

import argparse
from pathlib import Path

from ravan_flwr.cli.parts import Commands, add_gpus


def add(commands: Commands) -> None:
    """Offer `study`."""
    study = commands.add_parser(
        "study",
        help="run a grid of settings and seeds, and write a table",
        description="Run what a study file names and is not done yet; write its tables.",
    )
    study.add_argument(
        "file", type=Path, metavar="FILE", help="a file such as conf/studies/ablations-digits.yaml"
    )
    study.add_argument("--output", type=Path, help="folder of the study (default: studies/NAME)")
    study.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    study.add_argument(
        "--engine",
        choices=("process", "flower"),
        default="process",
        help="process: each run as `simulate` does; flower: as `run` does (default: process)",
    )
    add_gpus(study)
    study.set_defaults(command=_study)


def _study(parsed: argparse.Namespace) -> None:
    from ravan_flwr.runs.console import show  # noqa: PLC0415
    from ravan_flwr.studies.running import run_study  # noqa: PLC0415

    if not parsed.file.is_file():
        raise ValueError(f"study: found no file {parsed.file}; expected one such as those of conf/")
    if parsed.jobs < 1:
        raise ValueError(f"--jobs {parsed.jobs}: expected a whole number at least 1, such as 2")
    per_gpu = parsed.clients_per_gpu
    if per_gpu is not None and parsed.engine != "flower":
        raise ValueError(
            f"--clients-per-gpu {per_gpu}: got --engine {parsed.engine} beside it, expected "
            "flower, whose clients are processes of their own; add --engine flower"
        )
    show()
    folder = (parsed.output or Path("studies") / parsed.file.stem).absolute()
    if not run_study(parsed.file, folder, parsed.jobs, parsed.engine, per_gpu):
        raise RuntimeError("some runs failed; they are listed above; the same command tries again")
