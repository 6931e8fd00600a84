"""Offer the command `ravan-flwr`. Torch and Flower are imported by the commands that need them."""

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TypeAlias

from ravan_flwr.config.keys import KEYS
from ravan_flwr.config.run_config import read_config
from ravan_flwr.config.words import key_table, read_settings
from ravan_flwr.importing import importing
from ravan_flwr.launch.signals import Ended, ending_on_signals
from ravan_flwr.runs.console import hush, say_loading

_Commands: TypeAlias = "argparse._SubParsersAction[argparse.ArgumentParser]"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parse the command line, run the command, exit: 0 done, 1 failed, 2 asked for wrongly."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.error(_about(unknown[0]))
    command: Callable[[argparse.Namespace], None] = parsed.command
    try:
        with ending_on_signals():
            command(parsed)
            sys.stdout.flush()
    except BrokenPipeError:  # whoever read the output has seen enough
        hush()
        sys.exit(128 + signal.SIGPIPE)
    except ValueError as error:
        sys.exit(_complain(error, 2))
    except (RuntimeError, OSError) as error:
        sys.exit(_complain(error, 1))
    except Ended as ended:
        sys.exit(_complain(f"ended by {ended.signal.name}", 128 + ended.signal))
    except KeyboardInterrupt:
        sys.exit(_complain("interrupted", 130))


def _about(word: str) -> str:
    """Describe an unknown option, which may be a key with dashes before it."""
    key, _, value = word.lstrip("-").partition("=")
    known = "num-clients", *KEYS
    written = f"; keys are written without dashes: {key}={value or 'VALUE'}"
    return f"unrecognized argument {word!r}{written if key in known else ''}"


def _complain(problem: object, status: int) -> int:
    with suppress(OSError):  # of a terminal that was closed
        sys.stderr.write(f"ravan-flwr: error: {problem}\n")
        sys.stderr.flush()
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="ravan-flwr",
        description="Federated fine-tuning with multi-head low-rank adapters.",
    )
    commands: _Commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command, about in (
        ("simulate", _simulate, "run the app in this process, one client after the other"),
        ("run", _run, "run the app in Flower's simulation runtime, and end what that starts"),
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
        if name == "run":
            _add_gpus(sub)
            sub.add_argument(
                "--runs-at-a-time",
                type=int,
                default=1,
                metavar="N",
                help="so many such runs share this machine's GPUs and CPUs, as under study --jobs "
                "(default: 1)",
            )
    _add_fetch(commands)
    _add_study(commands)
    _add_report(commands)
    _add_spectrum(commands)
    _add_export(commands)
    _add_keys(commands)
    return parser


def _add_gpus(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clients-per-gpu",
        type=int,
        metavar="N",
        help="clients at a time on each GPU, 0 for a run on the CPU (default: as many as fit, "
        "by the plan's count of memory)",
    )


def _add_fetch(commands: _Commands) -> None:
    fetch = commands.add_parser(
        "fetch",
        help="download a preset's model and data, for devices without a connection later",
        description="Bring what a preset needs of the hub into its cache on this machine.",
    )
    fetch.add_argument("preset", help="a preset such as glue-llama")
    fetch.add_argument(
        "settings", nargs="*", metavar="KEY=VALUE", help="such as glue-task, model, data"
    )
    fetch.set_defaults(command=_fetch)


def _add_study(commands: _Commands) -> None:
    study = commands.add_parser(
        "study",
        help="run a grid of settings and seeds, and write a table",
        description="Run what a study file names and is not done yet; write its tables.",
    )
    study.add_argument("file", type=Path, help="a file such as conf/studies/ablations-digits.yaml")
    study.add_argument("--output", type=Path, help="folder of the study (default: studies/NAME)")
    study.add_argument("--jobs", type=int, default=1, help="runs at a time (default: 1)")
    study.add_argument(
        "--engine",
        choices=("process", "flower"),
        default="process",
        help="process: each run as `simulate` does; flower: as `run` does (default: process)",
    )
    _add_gpus(study)
    study.set_defaults(command=_study)


def _add_report(commands: _Commands) -> None:
    report = commands.add_parser(
        "report",
        help="write a page and pictures of one run, or of several laid over each other",
        description="Write index.html and PNGs of runs; seeds of one thing become a band.",
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    report.add_argument(
        "--output", type=Path, help="folder (default: report/ in the run, or here for several)"
    )
    report.set_defaults(command=_report)


def _add_spectrum(commands: _Commands) -> None:
    spectrum = commands.add_parser(
        "spectrum",
        help="plot the singular values and effective ranks of what runs added to the weights",
        description="Write spectrum.png, effective-rank.png and spectrum.csv of runs.",
    )
    spectrum.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run directory")
    spectrum.add_argument("--output", type=Path, default=Path("spectrum"), help="folder")
    spectrum.add_argument("--top", type=int, default=64, help="values to show (default: 64)")
    spectrum.set_defaults(command=_spectrum)


def _add_export(commands: _Commands) -> None:
    export = commands.add_parser(
        "export",
        help="write a run's result as a PEFT or transformers folder",
        description="Write a run's result in a form that other software loads.",
    )
    export.add_argument("run", type=Path, help="a run directory")
    export.add_argument(
        "--as",
        dest="form",
        required=True,
        choices=("peft", "merged"),
        help="peft: an adapter for PeftModel.from_pretrained; merged: a whole transformers model",
    )
    export.add_argument("folder", type=Path, help="a folder that is new")
    export.set_defaults(command=_export)


def _add_keys(commands: _Commands) -> None:
    keys = commands.add_parser(
        "keys",
        help="make the certificates and keys of a deployment",
        description="Make a certificate authority, the SuperLink's TLS certificate and the keys "
        "of SuperNodes, a folder for each machine. What is missing is made and what exists is "
        "never overwritten: the same command with a larger --nodes adds nodes, and a node's "
        "folder that was removed is made anew.",
    )
    keys.add_argument("folder", type=Path, help="a folder that is new, or one made by this command")
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


def _simulate(parsed: argparse.Namespace) -> None:
    config, num_clients = read_settings(parsed.settings)
    read_config(config)  # before anything heavy is imported

    say_loading()
    with importing():
        from ravan_flwr.launch.in_process import simulate  # noqa: PLC0415
    simulate(config, num_clients)


def _run(parsed: argparse.Namespace) -> None:
    config, num_clients = read_settings(parsed.settings)
    checked = read_config(config)

    from ravan_flwr.launch.superlink import run_in_flower  # noqa: PLC0415

    number = num_clients or checked.num_clients
    run_in_flower(config, number, parsed.clients_per_gpu, parsed.runs_at_a_time)


def _fetch(parsed: argparse.Namespace) -> None:
    config, _ = read_settings(parsed.settings)
    read_config(config | {"preset": parsed.preset})

    from ravan_flwr.launch.fetch import fetch  # noqa: PLC0415

    for line in fetch(config | {"preset": parsed.preset}):
        sys.stdout.write(line + "\n")


def _study(parsed: argparse.Namespace) -> None:
    from ravan_flwr.runs.console import show  # noqa: PLC0415
    from ravan_flwr.studies.running import run_study  # noqa: PLC0415

    if not parsed.file.is_file():
        raise ValueError(f"study: found no file {parsed.file}; expected one such as those of conf/")
    if parsed.jobs < 1:
        raise ValueError(f"--jobs {parsed.jobs}: expected a whole number at least 1; change it")
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


def _report(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.report import write_report  # noqa: PLC0415

    default = parsed.runs[0] / "report" if len(parsed.runs) == 1 else Path("report")
    page = write_report(parsed.runs, parsed.output or default)
    sys.stdout.write(f"report: {page.absolute()}\n")


def _spectrum(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.spectrum import write_spectra  # noqa: PLC0415

    if parsed.top < 1:
        raise ValueError(f"--top {parsed.top}: expected a whole number at least 1; change it")
    for path in write_spectra(parsed.runs, parsed.output, parsed.top):
        sys.stdout.write(f"wrote {path.absolute()}\n")


def _export(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.export import export_run  # noqa: PLC0415

    export_run(parsed.run, parsed.form, parsed.folder)
    sys.stdout.write(f"wrote {parsed.folder.absolute()}\n")


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


def _plan(parsed: argparse.Namespace) -> None:
    config, num_clients = read_settings(parsed.settings)
    read_config(config)  # before anything heavy is imported

    say_loading()
    with importing():
        from ravan_flwr.training.plan import plan_of  # noqa: PLC0415

    sys.stdout.write(plan_of(config, num_clients) + "\n")
