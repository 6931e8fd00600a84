"""The command that creates a preset."""

import argparse
import sys
from pathlib import Path

from ravan_flwr.cli.parts import Commands
from ravan_flwr.config.keys import AUTO
from ravan_flwr.config.places import chosen_model, place_of_data
from ravan_flwr.config.presets import new_file
from ravan_flwr.files import read_file
from ravan_flwr.importing import importing
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.runs.console import say_loading
from ravan_flwr.specs import ModelSpec

_MOST = 2**20  # bytes of a chat template, which a preset has to hold


def add(commands: Commands) -> None:
    """Offer `new`."""
    new = commands.add_parser(
        "new",
        help="write a preset for your own data and model",
        description="Look at a data set and a model, and write conf/NAME.yaml, a preset for them. "
        "A folder of data holds CSV, JSON lines or parquet (train.csv, test.csv), or images in a "
        "folder for each class (train/CLASS/*.png, test/CLASS/*.png).",
    )
    new.add_argument("name", metavar="NAME", help="the preset's name: conf/NAME.yaml, preset=NAME")
    new.add_argument(
        "--data", required=True, metavar="FOLDER", help="a folder, or an id of the Hugging Face Hub"
    )
    new.add_argument(
        "--model",
        required=True,
        metavar="FOLDER",
        help="the same, of a pretrained model; or digits-vit, which comes with ravan-flwr",
    )
    new.add_argument(
        "--clients",
        type=int,
        default=0,
        metavar="N",
        help="number of devices; without it as many simulated clients as the data feed",
    )
    for option, about in (
        ("--text", "the column of texts, where the data leave it open"),
        ("--text-pair", "the column of second texts, where examples are pairs"),
        ("--image", "the column of images"),
        ("--label", "the column of classes"),
    ):
        new.add_argument(option, default="", metavar="COLUMN", help=about)
    new.add_argument("--subset", default="", metavar="NAME", help="of a data set that has several")
    new.add_argument(
        "--targets",
        default="",
        metavar="ENDS",
        help="ends of the names of the layers to adapt, with commas between them, for "
        "architectures that ravan-flwr does not know",
    )
    new.add_argument(
        "--chat-template",
        default="",
        metavar="FILE",
        help="a Jinja template that writes conversations, in place of the tokenizer's",
    )
    new.set_defaults(command=_new)


def _new(parsed: argparse.Namespace) -> None:
    # What needs no library first: they take seconds to import.
    new_file(parsed.name)
    place_of_data(parsed.data)
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
