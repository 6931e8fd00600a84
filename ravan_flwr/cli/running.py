"""Commands that run the app once, plan a run, or create a preset."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from ravan_flwr.cli.parts import ENGINE, Commands, add_command, check_engine, option
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import key_table, read_settings
from ravan_flwr.config.presets import (
    chosen_model,
    new_preset_path,
    parse_location,
    with_preset_path,
)
from ravan_flwr.config.run_config import read_config
from ravan_flwr.files import read_file
from ravan_flwr.importing import importing
from ravan_flwr.launch.start import read_start
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.runs.console import report_loading, write_stdout
from ravan_flwr.specs import ModelSpec, Scalar

_MAX_BYTES = 2**20  # of a chat template, which is stored in the preset


# fmt: off
def add(commands: Commands) -> None:
    """Add `simulate`, `plan` and `new`."""
    keys = option("settings", nargs="*", metavar="KEY=VALUE", help="a key of the run config")
    table = key_table()
    add_command(commands, "simulate", _simulate,
        "run the app on this machine, with simulated clients", keys, *ENGINE,
        option("--runs-at-a-time", type=int, default=1, metavar="N",
            help="with --engine flower: so many such runs share this machine (default: 1)"),
        epilog=table)
    add_command(commands, "plan", _plan, "report what a run will train, send and need", keys,
        option("--partition", action="store_true",
            help="show the partition in place of the costs: examples by client and class"),
        note="Nothing is run.", epilog=table)
    add_command(commands, "new", _new, "write a preset for your own data and model",
        option("name", metavar="NAME",
            help="the preset's name: it becomes conf/NAME.yaml here, where preset=NAME takes it"),
        option("--data", required=True, metavar="FOLDER",
            help="a folder, or an id of the Hugging Face Hub"),
        option("--model", required=True, metavar="FOLDER",
            help="the same, of a pretrained model; or digits-vit, which comes with ravan-flwr"),
        option("--clients", type=int, metavar="N",
            help="number of devices, at most one an example (default: 10 simulated clients)"),
        *(option(name, default="", metavar=metavar, help=about) for name, metavar, about in (
            ("--text", "COLUMN", "the column of texts, if it is not called text"),
            ("--text-pair", "COLUMN", "the column of second texts, where examples are pairs"),
            ("--image", "COLUMN", "the column of images, if it is not called image"),
            ("--label", "COLUMN", "the column of classes, if it is not called label"),
            ("--subset", "NAME", "of a data set that has several"),
            ("--targets", "ENDS", "ends of names of the layers to adapt, with commas between them"),
            ("--chat-template", "FILE", "a Jinja template in place of the tokenizer's"))),
        note="A folder of data holds CSV, JSON lines or parquet (train.csv, test.csv), or images "
        "in a folder for each class (train/CLASS/*.png, test/CLASS/*.png).")
# fmt: on


def _simulate(parsed: argparse.Namespace) -> None:
    check_engine(parsed)
    start = read_start(*read_settings(parsed.settings))
    if parsed.engine == "flower":
        from ravan_flwr.launch.superlink import run_in_flower  # noqa: PLC0415

        run_in_flower(start, parsed.clients_per_gpu, parsed.runs_at_a_time)
        return
    report_loading()
    with importing():
        from ravan_flwr.launch.in_process import run  # noqa: PLC0415
    run(start)


def _plan(parsed: argparse.Namespace) -> None:
    settings, num_clients = read_settings(parsed.settings)
    read_config(with_preset_path(settings))  # check the settings before heavy imports
    if parsed.partition:
        _show_partition(settings, num_clients)
        return

    report_loading()
    with importing():
        from ravan_flwr.training.plan import plan_of  # noqa: PLC0415

    sys.stdout.write(plan_of(settings, num_clients) + "\n")


def _show_partition(config: Mapping[str, Scalar], num_clients: int | None) -> None:
    report_loading()
    with importing():
        from ravan_flwr.lab.partition import as_text, assign  # noqa: PLC0415

    write_stdout(as_text(assign(config, num_clients)) + "\n")


def _new(parsed: argparse.Namespace) -> None:
    # First the checks that need no library: libraries take seconds to import.
    new_preset_path(parsed.name)
    parse_location("data", parsed.data)
    if parsed.clients is not None and parsed.clients < 2:
        raise ValueError(f"--clients: got {parsed.clients}, expected 2 or more")
    chosen_model(ModelSpec("hub", ""), parsed.model, parsed.targets or AUTO)
    chat_template = _read(parsed.chat_template) if parsed.chat_template else ""

    report_loading()
    with importing():
        from ravan_flwr.preset_wizard.create import new_preset  # noqa: PLC0415

    columns = {
        role: getattr(parsed, role.replace("-", "_"))
        for role in ("text", "text-pair", "image", "label")
    }
    for line in new_preset(
        parsed.name,
        parsed.data,
        parsed.model,
        names={role: column for role, column in columns.items() if column},
        subset=parsed.subset,
        targets=parsed.targets,
        chat_template=chat_template,
        clients=parsed.clients or 0,
    ):
        sys.stdout.write(plain(line) + "\n")
        sys.stdout.flush()


def _read(name: str) -> str:
    """Return the text of a chat template."""
    try:
        return read_file(Path(name).expanduser(), _MAX_BYTES).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template {name}: it cannot be read ({error}), expected a file with a Jinja "
            "template; give the path of such a file"
        ) from None
