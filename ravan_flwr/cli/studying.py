"""Commands that run the app many times."""

import argparse
from pathlib import Path

from ravan_flwr.cli.parts import ENGINE, Commands, add_command, check_device, check_engine, option
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import key_table, read_settings
from ravan_flwr.config.run_config import read_config


# fmt: off
def add(commands: Commands) -> None:
    """Add `study` and `tune`."""
    shared = (option("--jobs", type=int, default=1, help="runs at a time (default: 1)"), *ENGINE)
    add_command(commands, "study", _study,
        "run a grid of settings and seeds that is not done yet, and write a table",
        option("file", type=Path, metavar="FILE", help="such as conf/studies/spectra.yaml"),
        option("settings", nargs="*", metavar="KEY=VALUE",
            help="data, model, device or processes of this machine, for every run"),
        option("--output", type=Path, help="folder of the study (default: studies/NAME)"),
        option("--page", type=Path, metavar="PAGE.md",
            help="write the tables into this page as well, and pictures beside it"),
        option("--tables-only", action="store_true",
            help="run nothing: write the tables of finished runs"),
        option("--plan", action="store_true",
            help="print the number of runs and about how long they take, from a round of each "
            "table that is tried; run nothing else"), *shared,
        note="docs/compare.md describes it.")
    add_command(commands, "tune", _tune,
        "choose the learning rate of a method, and write it into the preset",
        option("settings", nargs="*", metavar="KEY=VALUE", help="a key of the run config"),
        option("--output", type=Path, help="folder (default: studies/tune-PRESET-METHOD)"),
        option("--rates", metavar="RATE,RATE,...",
            help="try these rates alone (default: three around the preset's, more at an edge)"),
        option("--no-write", action="store_true", help="print the line, keep the preset"),
        option("--dry-run", action="store_true", help="print the planned runs, run none"), *shared,
        note="Rates are compared on the clients' validation splits.",
        epilog=key_table())
# fmt: on


def _check_options(parsed: argparse.Namespace) -> None:
    if parsed.jobs < 1:
        raise ValueError(f"--jobs {parsed.jobs}: expected a whole number at least 1, such as 2")
    check_engine(parsed)


def _study(parsed: argparse.Namespace) -> None:
    from ravan_flwr.lab.planning import plan_study  # noqa: PLC0415
    from ravan_flwr.lab.running import RunOptions, run_study  # noqa: PLC0415
    from ravan_flwr.runs.console import log, log_to_stdout  # noqa: PLC0415

    if not parsed.file.is_file():
        raise ValueError(f"study: found no file {parsed.file}; expected one as in conf/studies/")
    _check_options(parsed)
    overrides, num_clients = read_settings(parsed.settings)
    if num_clients is not None:
        raise ValueError(
            f"study: got num-clients={num_clients}, expected it in the study's file; write it there"
        )
    if not parsed.tables_only:
        check_device(str(overrides.get("device", AUTO)))
    log_to_stdout()
    folder = (parsed.output or Path("studies") / parsed.file.stem).absolute()
    if parsed.plan:
        run_options = RunOptions(parsed.engine, parsed.jobs, parsed.clients_per_gpu)
        plan_study(parsed.file, folder, run_options, parsed.page, overrides)
        return
    options = (parsed.jobs, parsed.engine, parsed.clients_per_gpu, parsed.page, parsed.tables_only)
    try:
        all_done = run_study(parsed.file, folder, *options, overrides=overrides)
    except KeyboardInterrupt:
        log.info("finished runs are kept in %s; the same command continues there", folder)
        raise
    if not all_done and not parsed.tables_only:
        raise RuntimeError("some runs failed; they are listed above; the same command tries again")


def _tune(parsed: argparse.Namespace) -> None:
    from ravan_flwr.lab.running import RunOptions  # noqa: PLC0415
    from ravan_flwr.lab.tuning import adopt, plan_tuning, summary, tune  # noqa: PLC0415
    from ravan_flwr.runs.console import log, log_to_stdout  # noqa: PLC0415

    _check_options(parsed)
    settings, num_clients = read_settings(parsed.settings)
    if parsed.engine == "flower":
        read_config(settings)  # rejects a preset's path: Flower bundles only the app's presets
    tuning = plan_tuning(settings, num_clients, _rates(parsed.rates))
    log_to_stdout()
    config = tuning.config
    folder = parsed.output or Path("studies") / f"tune-{Path(config.preset).stem}-{config.method}"
    log.info("%s\nfolder %s", tuning.describe(), folder.absolute())
    if parsed.dry_run:
        return
    check_device(config.device)
    options = RunOptions(parsed.engine, parsed.jobs, parsed.clients_per_gpu)
    try:
        choice = tune(tuning, folder.absolute(), options)
    except KeyboardInterrupt:
        log.info("finished runs are kept in %s; the same command continues there", folder)
        raise
    log.info("%s\nresults: %s", summary(choice), folder / "results.md")
    log.info("%s", adopt(tuning, choice, write=not parsed.no_write))


def _rates(text: str | None) -> list[float]:
    """Return the comma-separated numbers of `--rates`."""
    try:
        return [float(word) for word in (text or "").replace(",", " ").split()]
    except ValueError:
        raise ValueError(
            f"--rates {text}: expected numbers with commas between, such as 1e-3,3e-3"
        ) from None
