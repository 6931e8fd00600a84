"""Commands for a deployment: make its keys, check its machines, deliver a finished run's result."""

import argparse
import sys
from pathlib import Path

from ravan_flwr.cli.parts import RUN, Commands, add_command, option
from ravan_flwr.optional import MAKE_KEYS, load


# fmt: off
def add(commands: Commands) -> None:
    """Add `keys`, `doctor` and `deliver`."""
    keys = add_command(commands, "keys", _keys,
        "make the certificates and keys of a deployment, or a device's for secure aggregation",
        option("folder", type=Path, metavar="FOLDER", help="folder to write them to"),
        option("--host", dest="hosts", action="append", default=[], metavar="NAME",
            help="with --nodes: name or IP address at which SuperNodes reach the SuperLink, once "
            "for each; later calls need none"),
        note="Existing files are never overwritten; a removed folder of a node is made again.")
    kinds = keys.add_mutually_exclusive_group(required=True)
    kinds.add_argument("--nodes", type=int, metavar="N",
        help="on the operator's machine: number of SuperNodes in all, with keys or not yet")
    kinds.add_argument("--partition-id", type=int, metavar="N",
        help="on a device, for secure aggregation: the partition-id of its node config; FOLDER is "
        "the one that secure-keys=FOLDER names")
    add_command(commands, "doctor", _doctor,
        "check a server or a device before a run: connection, keys, clock, folders, versions",
        option("folder", type=Path, metavar="FOLDER",
            help="this machine's keys: superlink/ of the server, node-0/ of a device, whose other "
            "options are read from the file node-0.env beside it, if there is one"),
        option("--superlink", metavar="HOST:PORT",
            help="where a device reaches the server (on the server: 127.0.0.1:8001)"),
        option("--node-config", metavar="TEXT", help="a device's, as its SuperNode has it"),
        option("--user", help="the service's user, to check access to folders; needs root"),
        *(option(f"--{verb}", action="append", default=[], type=Path, metavar="FOLDER",
            help=f"a further folder that this user must {verb}{to}; once for each")
          for verb, to in (("read", ""), ("write", " to"))),
        note="A line for each check: ok, or what to do. Ends with 1 if there is something to do.")
    add_command(commands, "deliver", _deliver,
        "give the devices that are connected now the result of a run that has ended",
        RUN, option("superlink", metavar="SUPERLINK",
            help="name of the SuperLink in Flower's config.toml, as for flwr run . SUPERLINK"),
        note="Call it in the app's folder, on the machine of the run directory. RUN/summary.json "
        "lists the clients that have the result.")
# fmt: on


def _keys(parsed: argparse.Namespace) -> None:
    folder = parsed.folder.absolute()
    if parsed.nodes is None:
        _keys_of_device(folder, parsed.partition_id, parsed.hosts)
        return

    from ravan_flwr.launch import credentials  # noqa: PLC0415

    for path in credentials.make_credentials(folder, parsed.hosts, parsed.nodes):
        sys.stdout.write(f"made {path}\n")
    certificate = credentials.load_certificate(folder / "superlink" / "superlink.crt")
    sys.stdout.write(
        f"The SuperLink's certificate is for {', '.join(credentials.list_hosts(certificate))}, "
        f"until {certificate.not_valid_after_utc:%Y-%m-%d}.\n"
        "superlink/          goes to the SuperLink's machine, whole\n"
        "node-0/, node-1/... go to one SuperNode's machine each, whole\n"
        "node-*/node.pub     are registered: flwr supernode register node-0/node.pub NAME\n"
        "authority/ca.crt    goes to every machine that calls flwr run; it is no secret\n"
        "authority/ca.key    stays here, or better offline: it can sign a SuperLink of its own\n"
    )


def _keys_of_device(folder: Path, partition: int, hosts: list[str]) -> None:
    if hosts:
        raise ValueError(
            f"--host {hosts[0]}: got --partition-id beside it, expected --nodes, since a device's "
            "keys for secure aggregation are for no host; leave one of them out"
        )
    if partition < 0:
        raise ValueError(
            f"--partition-id {partition}: expected a whole number at least 0, such as 3"
        )
    public = load(MAKE_KEYS)(folder, partition)
    sys.stdout.write(
        f"made {public}\n"
        f"{public.name}  goes into this folder of every other device, by a way that the server "
        "has no part in\n"
        f"{public.with_suffix('.key').name}  stays here\n"
        f'node config  secure-keys="{folder}"\n'
    )


def _doctor(parsed: argparse.Namespace) -> None:
    from ravan_flwr.launch.doctor import checks  # noqa: PLC0415

    to_do = 0
    for check in checks(parsed.folder.absolute(), parsed):
        sys.stdout.write(f"{check}\n")
        sys.stdout.flush()
        to_do += not check.ok
    if to_do:
        raise RuntimeError(f"{to_do} of the checks above failed, and state what to do")


def _deliver(parsed: argparse.Namespace) -> None:
    from ravan_flwr.launch.submit import deliver  # noqa: PLC0415

    summary = deliver(parsed.run, parsed.superlink)
    for node in summary["delivered"]:
        sys.stdout.write(f"partition {node['partition-id']} has the result, in {node['folder']}/\n")
    for failure in summary["not-delivered"]:
        sys.stdout.write(f"{failure['client']} does not have it: {failure['reason']}\n")
