"""Commands that show a run, or use its result."""

import argparse
import json
import sys
from pathlib import Path

from ravan_flwr.cli.parts import RUN, Commands, add_command, option
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.specs import EXPORT_FORMS

# fmt: off
_CLIENT = option("--client", type=int, metavar="N",
    help="the client whose model is meant, by its partition, in a run with personal parameters")

_MODEL = option("--model", type=Path, metavar="FOLDER",
    help="the folder of the pretrained model, if it has moved since the run")


def add(commands: Commands) -> None:
    """Add `report`, `evaluate`, `predict` and `export`."""
    add_command(commands, "report", _report,
        "write a page of one run, or of several",
        option("runs", nargs="+", type=Path, metavar="RUN", help="a run directory"),
        option("--output", type=Path,
            help="folder (default: report/ in the run, or here for several)"),
        option("--spectrum", action="store_true",
            help="add singular values and effective ranks of the runs' delta-weights"),
        note="To watch a run in progress, set tracking=tensorboard, wandb or mlflow.")
    add_command(commands, "evaluate", _evaluate,
        "measure a run's result on labelled examples that it has not seen, class by class",
        RUN, option("--data", required=True, metavar="FOLDER",
            help="a folder, a file (CSV, JSON lines, parquet) or an id of the hub, with the "
            "columns of the run's preset; of its splits the preset's tests, or `test`, else all"),
        _CLIENT, _MODEL,
        option("--json", action="store_true", help="print one JSON object, and no text"))
    add_command(commands, "predict", _predict,
        "write a run's answers for texts or images without labels",
        RUN, option("--data", required=True, type=Path, metavar="FILE",
            help="CSV, JSON lines or parquet with the columns of the run's preset; an image, or a "
            "folder of them"),
        option("--output", required=True, type=Path, metavar="FILE",
            help="a new file: .csv, .jsonl or .parquet"),
        _CLIENT, _MODEL, note="A row that cannot be read has no answer, and the reason.")
    add_command(commands, "export", _export,
        "write a run's result as a folder that other software loads",
        RUN, option("--as", dest="form", required=True, choices=EXPORT_FORMS,
            help="for PeftModel.from_pretrained a LoRA (peft), or the heads themselves (ravan, "
            "with ravan-flwr installed); or a whole transformers model (merged)"),
        option("folder", type=Path, metavar="FOLDER", help="a folder that is new"), _CLIENT, _MODEL)
# fmt: on


def _report(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.report import write_report  # noqa: PLC0415
    from ravan_flwr.runs.console import log_to_stdout  # noqa: PLC0415

    log_to_stdout()
    default = parsed.runs[0] / "report" if len(parsed.runs) == 1 else Path("report")
    page = write_report(parsed.runs, parsed.output or default, spectrum=parsed.spectrum)
    sys.stdout.write(f"report: {page.absolute()}\n")


def _evaluate(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.evaluation import as_text, evaluate  # noqa: PLC0415

    content = evaluate(parsed.run, parsed.data, parsed.client, parsed.model)
    sys.stdout.write(json.dumps(content) + "\n" if parsed.json else as_text(content))


def _predict(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.prediction import predict  # noqa: PLC0415

    result = predict(parsed.run, parsed.data, parsed.output, parsed.client, parsed.model)
    for problem in result.problems:
        sys.stderr.write(f"{plain(problem)}\n")
    if result.unreadable:
        unlisted = result.unreadable - len(result.problems)
        suffix = f" ({unlisted} more than are listed)" if unlisted else ""
        sys.stderr.write(f"{result.unreadable} of {result.rows} rows cannot be read{suffix}\n")
    rows = result.rows - result.unreadable
    sys.stdout.write(f"wrote {result.output.absolute()}: {rows} of {result.rows} rows predicted\n")


def _export(parsed: argparse.Namespace) -> None:
    from ravan_flwr.results.export import export_run  # noqa: PLC0415

    export_run(parsed.run, parsed.form, parsed.folder, parsed.client, parsed.model)
    sys.stdout.write(f"wrote {parsed.folder.absolute()}\n")
