"""Commands that prepare machines: their keys, and what they need of the hub."""

import argparse
import sys
from pathlib import Path

from ravan_flwr.cli.parts import Commands
from ravan_flwr.config.key_values import read_settings
from ravan_flwr.config.presets import own_preset
from ravan_flwr.config.run_config import read_config


def add(commands: Commands) -> None:
    """Offer `fetch`, `keys` and `secure-keys`."""
    _add_fetch(commands)
    _add_keys(commands)
    _add_secure_keys(commands)


def _add_fetch(commands: Commands) -> None:
    fetch = commands.add_parser(
        "fetch",
        help="download a preset's model and data, for devices without a connection later",
        description="Bring what a preset needs of the hub into its cache on this machine.",
    )
    fetch.add_argument("preset", metavar="PRESET", help="a preset such as glue-llama")
    fetch.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="such as glue-task, model, data"
    )
    fetch.set_defaults(command=_fetch)


def _add_keys(commands: Commands) -> None:
    keys = commands.add_parser(
        "keys",
        help="make the certificates and keys of a deployment",
        description="Make a certificate authority, the SuperLink's TLS certificate and the keys "
        "of SuperNodes, a folder for each machine. What is missing is made and what exists is "
        "never overwritten: the same command with a larger --nodes adds nodes, and a node's "
        "folder that was removed is made anew.",
    )
    keys.add_argument(
        "folder",
        type=Path,
        metavar="FOLDER",
        help="a folder that is new, or one made by this command",
    )
    keys.add_argument(
        "--host",
        dest="hosts",
        action="append",
        default=[],
        metavar="NAME",
        help="name or IP address at which SuperNodes reach the SuperLink, once for each; "
        "localhost is always among them, and later calls need none",
    )
    keys.add_argument(
        "--nodes",
        type=int,
        required=True,
        metavar="N",
        help="how many SuperNodes there are, those that have keys already included",
    )
    keys.set_defaults(command=_keys)


def _add_secure_keys(commands: Commands) -> None:
    keys = commands.add_parser(
        "secure-keys",
        help="make a device's keys for secure aggregation",
        description="Make the key by which a device signs in secure rounds, and the public one "
        "that all other devices need, on the device itself: whoever has a private key can speak "
        "for its device. Files that are there are never overwritten.",
    )
    keys.add_argument(
        "folder", type=Path, metavar="FOLDER", help="the folder that secure-keys=FOLDER names"
    )
    keys.add_argument(
        "--partition-id",
        type=int,
        required=True,
        metavar="N",
        help="the device's partition-id, as in its node config",
    )
    keys.set_defaults(command=_secure_keys)


def _secure_keys(parsed: argparse.Namespace) -> None:
    from ravan_flwr.secure.node_keys import make_keys  # noqa: PLC0415

    folder, number = parsed.folder.absolute(), parsed.partition_id
    if number < 0:
        raise ValueError(f"--partition-id {number}: expected a whole number at least 0, such as 3")
    public = make_keys(folder, number)
    sys.stdout.write(
        f"made {public}\n"
        f"{public.name}  goes into this folder of every other device, by a way that the server "
        "has no part in\n"
        f"{public.with_suffix('.key').name}  stays here\n"
        f'node config  secure-keys="{folder}"\n'
    )


def _fetch(parsed: argparse.Namespace) -> None:
    config, _ = read_settings(parsed.settings)
    read_config(own_preset(config | {"preset": parsed.preset}))

    from ravan_flwr.launch.fetch import fetch  # noqa: PLC0415

    for line in fetch(config | {"preset": parsed.preset}):
        sys.stdout.write(line + "\n")


def _keys(parsed: argparse.Namespace) -> None:
    from ravan_flwr.launch.credentials import (  # noqa: PLC0415
        certificate_of,
        hosts_of,
        make_credentials,
    )

    folder = parsed.folder.absolute()
    for made in make_credentials(folder, parsed.hosts, parsed.nodes):
        sys.stdout.write(f"made {made}\n")
    certificate = certificate_of(folder / "superlink" / "superlink.crt")
    sys.stdout.write(
        f"The SuperLink's certificate is for {', '.join(hosts_of(certificate))}, until "
        f"{certificate.not_valid_after_utc:%Y-%m-%d}.\n"
        "superlink/          goes to the SuperLink's machine, whole\n"
        "node-0/, node-1/... go to one SuperNode's machine each, whole\n"
        "node-*/node.pub     are registered: flwr supernode register node-0/node.pub NAME\n"
        "authority/ca.crt    goes to whoever calls flwr run; it is no secret\n"
        "authority/ca.key    stays here, or better offline: it can sign a SuperLink of its own\n"
    )
