"""Commands that run the app once, or say what a run would do."""

import argparse
import json
import shutil
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ravan_flwr import training
from ravan_flwr.cli.parts import Commands, add_engine, check_device, check_engine
from ravan_flwr.config.key_values import key_table, read_settings
from ravan_flwr.config.keys import AUTO
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.files import read_file
from ravan_flwr.importing import importing
from ravan_flwr.runs.console import minutes, say_loading
from ravan_flwr.runs.directory import check_writable, with_those_of_the_run
from ravan_flwr.specs import ModelSpec, Scalar
from ravan_flwr.training.clients import number_of_clients


def add(commands: Commands) -> None:
    """Offer `simulate` and `plan`."""
    for name, command, about in (
        ("simulate", _simulate, "run the app on this machine, with simulated clients"),
        ("plan", _plan, "say what a run will train, send and need, before anything runs"),
    ):
        sub = commands.add_parser(
            name,
            help=about,
            description=about[0].upper() + about[1:] + ".",
            epilog=key_table(),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="a key of the run config")
        sub.set_defaults(command=command)
        if name == "plan":
            sub.add_argument(
                "--partition",
                action="store_true",
                help="show who has what in place of the costs: examples by client and class",
            )
            sub.add_argument(
                "--picture",
                type=Path,
                metavar="FILE",
                help="with --partition: write it as a picture, a new .png or .svg, without "
                "names of clients",
            )
        if name == "simulate":
            add_engine(sub)
            sub.add_argument(
                "--runs-at-a-time",
                type=int,
                default=1,
                metavar="N",
                help="with --engine flower: so many such runs share this machine's GPUs and CPUs, "
                "as under study --jobs (default: 1)",
            )


def _simulate(parsed: argparse.Namespace) -> None:
    check_engine(parsed)
    in_flower = parsed.engine == "flower"
    config, num_clients = read_settings(parsed.settings)
    config = config if in_flower else own_preset(config)
    config, num_clients = with_those_of_the_run(config, num_clients)
    checked = read_config(config)
    number = _refuse_early(checked, num_clients)
    if in_flower:
        from ravan_flwr.launch.superlink import run_in_flower  # noqa: PLC0415

        run_in_flower(config, number, parsed.clients_per_gpu, parsed.runs_at_a_time)
        return
    say_loading()
    check_device(checked.device)
    with importing():
        from ravan_flwr.launch.in_process import simulate  # noqa: PLC0415
    simulate(config, num_clients)


def _refuse_early(config: Config, asked: int | None) -> int:
    """Refuse what can be seen without PyTorch, before it is imported; return how many clients."""
    number = number_of_clients(config, asked)
    if config.output_dir != AUTO:
        check_writable(Path(config.output_dir).expanduser().absolute())
    size = _hidden_size(config.model)
    if config.rank is not None and size is not None and config.rank > size:
        raise ValueError(
            f"rank = {config.rank}: the model {config.model.name} has a hidden size of {size}, so "
            f"expected at most {size}; lower rank"
        )
    # The preset's own number fits its own data, which take a moment to read.
    if asked is not None and config.num_clients is not None and asked > config.num_clients:
        from ravan_flwr.data.examples import load_splits  # noqa: PLC0415
        from ravan_flwr.data.partitioning import check_number  # noqa: PLC0415

        check_number(asked, len(load_splits(config.data)["train"]))
    return number


def _hidden_size(model: ModelSpec) -> int | None:
    """Find the size of a model's hidden states, the side of every matrix that reads them, if known.

    None where it takes the hub to tell, or the model calls it otherwise.
    """
    if model.source == "bundled":
        path = Path(training.__file__).parent / "backbones" / f"{model.name}.json"
    else:
        path = Path(model.name) / "config.json"
    content: Mapping[str, Any] = dict(model.shape)
    if path.is_file():
        with suppress(ValueError, RecursionError):  # it is named where the model is built
            read = json.loads(read_file(path))
            read = read["config"] if model.source == "bundled" else read
            content = read if isinstance(read, dict) else {}
    found = next((content[n] for n in ("hidden_size", "d_model", "n_embd") if n in content), None)
    return found if type(found) is int else None


def _plan(parsed: argparse.Namespace) -> None:
    config, num_clients = read_settings(parsed.settings)
    checked = read_config(own_preset(config))  # before anything heavy is imported
    if parsed.picture is not None and not parsed.partition:
        raise ValueError(
            f"--picture {parsed.picture}: got no --partition beside it, expected both, since the "
            "picture shows who has what; add --partition, or leave --picture out to see the costs"
        )
    if parsed.partition:
        _show_partition(config, num_clients, parsed.picture)
        return

    say_loading()
    with importing():
        from ravan_flwr.training.plan import plan_of  # noqa: PLC0415

    sys.stdout.write(plan_of(config, num_clients) + "\n\n")
    number = number_of_clients(checked, num_clients)
    sys.stdout.write(_time_told(replace(checked, num_clients=number)) + "\n")


def _time_told(config: Config) -> str:
    """Say how long the training of a run in process takes here, and how that is known."""
    from ravan_flwr.training.speed import time_of_rounds  # noqa: PLC0415 (imports torch)

    try:
        seconds = time_of_rounds(config, config.num_rounds)
    except ValueError as error:
        return f"time            not estimated: {error}"
    return (
        f"time            about {minutes(seconds)} of training on this machine, in process\n"
        "                (a step's operations are counted, and timed by some like them;\n"
        "                evaluation, messages and waiting come on top)"
    )


def _show_partition(
    config: Mapping[str, Scalar], num_clients: int | None, picture: Path | None
) -> None:
    if picture is not None:
        from ravan_flwr.reports.partition_picture import check_picture  # noqa: PLC0415

        check_picture(picture)
    say_loading()
    with importing():
        from ravan_flwr.reports.partition import (  # noqa: PLC0415
            SHADES,
            as_text,
            deal,
        )

    dealt, coding = deal(config, num_clients), sys.stdout.encoding or "ascii"
    letters = SHADES[0].encode(coding, "replace").decode(coding) == SHADES[0]
    width = shutil.get_terminal_size((100, 24)).columns
    text = as_text(dealt, width, ascii_only=not letters)
    sys.stdout.write(text.encode(coding, "backslashreplace").decode(coding) + "\n")
    if picture is not None:
        from ravan_flwr.reports.partition_picture import write_picture  # noqa: PLC0415

        write_picture(dealt, picture)
        sys.stdout.write(f"wrote {picture.absolute()}\n")
