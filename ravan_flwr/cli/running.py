"""Commands that run the app once, say what a run would do, or create a preset."""

import argparse
import json
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ravan_flwr import training
from ravan_flwr.cli.parts import ENGINE, Commands, check_device, check_engine, offer, option
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import key_table, read_settings
from ravan_flwr.config.presets import chosen_model, new_file, own_preset, place_of
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.files import read_file
from ravan_flwr.importing import importing
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.runs.console import minutes, say, say_loading
from ravan_flwr.runs.directory import check_writable, with_those_of_the_run
from ravan_flwr.specs import ModelSpec, Scalar
from ravan_flwr.training.clients import number_of_clients

_MOST = 2**20  # bytes of a chat template, which a preset has to hold


# fmt: off
def add(commands: Commands) -> None:
    """Offer `simulate`, `plan` and `new`."""
    keys = option("settings", nargs="*", metavar="KEY=VALUE", help="a key of the run config")
    table = key_table()
    offer(commands, "simulate", _simulate, "run the app on this machine, with simulated clients",
        "Run the app on this machine, with simulated clients.", keys, *ENGINE,
        option("--runs-at-a-time", type=int, default=1, metavar="N",
            help="with --engine flower: so many such runs share this machine's GPUs and CPUs, as "
            "under study --jobs (default: 1)"), epilog=table)
    offer(commands, "plan", _plan, "report what a run will train, send and need",
        "Report what a run will train, send and need. Nothing is run.", keys,
        option("--partition", action="store_true",
            help="show the partition in place of the costs: examples by client and class"),
        epilog=table)
    offer(commands, "new", _new, "write a preset for your own data and model",
        "Look at a data set and a model, and write conf/NAME.yaml, a preset for them. A folder of "
        "data holds CSV, JSON lines or parquet (train.csv, test.csv), or images in a folder for "
        "each class (train/CLASS/*.png, test/CLASS/*.png).",
        option("name", metavar="NAME", help="the preset's name: conf/NAME.yaml, preset=NAME"),
        option("--data", required=True, metavar="FOLDER",
            help="a folder, or an id of the Hugging Face Hub"),
        option("--model", required=True, metavar="FOLDER",
            help="the same, of a pretrained model; or digits-vit, which comes with ravan-flwr"),
        option("--clients", type=int, default=0, metavar="N",
            help="number of devices; without it as many simulated clients as the data feed"),
        *(option(name, default="", metavar=what, help=about) for name, what, about in (
            ("--text", "COLUMN", "the column of texts, where the data leave it open"),
            ("--text-pair", "COLUMN", "the column of second texts, where examples are pairs"),
            ("--image", "COLUMN", "the column of images"),
            ("--label", "COLUMN", "the column of classes"),
            ("--subset", "NAME", "of a data set that has several"),
            ("--targets", "ENDS", "ends of the names of the layers to adapt, with commas between "
             "them, for architectures that ravan-flwr does not know"),
            ("--chat-template", "FILE", "a Jinja template that writes conversations, in place of "
             "the tokenizer's"))))
# fmt: on


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
        from ravan_flwr.data.partition import check_number  # noqa: PLC0415

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
    if parsed.partition:
        _show_partition(config, num_clients)
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


def _show_partition(config: Mapping[str, Scalar], num_clients: int | None) -> None:
    say_loading()
    with importing():
        from ravan_flwr.reports.partition import as_text, assign  # noqa: PLC0415

    say(as_text(assign(config, num_clients)) + "\n")


def _new(parsed: argparse.Namespace) -> None:
    # What needs no library first: they take seconds to import.
    new_file(parsed.name)
    place_of("data", parsed.data)
    if parsed.clients and parsed.clients < 2:
        raise ValueError(f"--clients: got {parsed.clients}, expected 2 or more; correct it")
    chosen_model(ModelSpec("hub", ""), parsed.model, parsed.targets or AUTO)
    chat_template = _read(parsed.chat_template) if parsed.chat_template else ""

    say_loading()
    with importing():
        from ravan_flwr.preset_wizard.columns import NamedColumns  # noqa: PLC0415
        from ravan_flwr.preset_wizard.create import new_preset  # noqa: PLC0415

    asked = NamedColumns(parsed.text, parsed.text_pair, parsed.image, parsed.label)
    for line in new_preset(
        parsed.name,
        parsed.data,
        parsed.model,
        asked=asked,
        subset=parsed.subset,
        targets=parsed.targets,
        chat_template=chat_template,
        clients=parsed.clients,
    ):
        sys.stdout.write(plain(line) + "\n")
        sys.stdout.flush()


def _read(name: str) -> str:
    """Read a chat template."""
    try:
        return read_file(Path(name).expanduser(), _MOST).decode()
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--chat-template {name}: it cannot be read ({error}), expected a file with a Jinja "
            "template; correct it"
        ) from None
