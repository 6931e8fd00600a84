"""The command that gives devices a finished run's result."""

import argparse
import sys
from pathlib import Path

from ravan_flwr.cli.parts import Commands


def add(commands: Commands) -> None:
    """Offer `deliver`."""
    deliver = commands.add_parser(
        "deliver",
        help="give the devices that are connected now the result of a run that has ended",
        description="Give every connected device that has a result-path in its node config the "
        "result of a run that has ended: those that were away when it ended, and new ones. Call it "
        "in the app's folder, on the server's machine, where the run directory is. Who has the "
        "result and who could not get it stands in RUN/summary.json.",
    )
    deliver.add_argument("run", type=Path, metavar="RUN", help="a run directory")
    deliver.add_argument(
        "superlink",
        metavar="SUPERLINK",
        help="name of the SuperLink in Flower's config.toml, as for flwr run . SUPERLINK",
    )
    deliver.set_defaults(command=_deliver)


def _deliver(parsed: argparse.Namespace) -> None:
    from ravan_flwr.launch.delivering import deliver  # noqa: PLC0415

    summary = deliver(parsed.run, parsed.superlink)
    for one in summary["delivered"]:
        sys.stdout.write(f"partition {one['partition-id']} has the result, in {one['folder']}/\n")
    for missed in summary["not-delivered"]:
        sys.stdout.write(f"{missed['client']} does not have it: {missed['reason']}\n")
