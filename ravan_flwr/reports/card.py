"""Write a model card: what a folder holds, where it comes from, how good it is, how to load it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ravan_flwr.data.model_folder import PROCESSOR, read_json
from ravan_flwr.methods import METHODS
from ravan_flwr.reports.classes import classes_of
from ravan_flwr.runs.console import uploads_seen
from ravan_flwr.runs.directory import RunDirectory, write_atomically
from ravan_flwr.runs.record import Metrics, Summary
from ravan_flwr.tasks import get_task
from ravan_flwr.templates import filled


def write_card(folder: Path, form: str, directory: RunDirectory) -> None:
    """Write the card of a run's result as `README.md`."""
    summary = directory.read_summary()
    fill_card(folder, form, directory.read_config(), summary, measured(summary, directory))


def fill_card(
    folder: Path, form: str, config: dict[str, Any], summary: Summary, final: Metrics
) -> None:
    """Write a card of these settings, this summary and these metrics of the result."""
    text = filled(
        Path(__file__).with_name("card.md"),
        {"cell": _cell, "literal": _literal, "place": _place},
        form=form,
        config=config,
        summary=summary,
        final=final,
        task=get_task(config["task"]),
        method=METHODS[config["method"]],
        channels=_channels(folder),
        uploads=uploads_seen(config),
        privacy=privacy_of(summary) if "epsilon" in summary else "",
    )
    write_atomically(folder / "README.md", text.encode(errors="backslashreplace"))


def privacy_of(spent: Mapping[str, Any]) -> str:
    """Say what a private run promises, and whom: its clients, their examples, or a larger run's."""
    whom = "each client"
    if spent.get("unit") == "example":
        whom = "each example of a client, the largest of all clients'"
    text = f"epsilon {spent['epsilon']:.3f}, delta {spent['delta']:g} for {whom}, "
    text += f"noise multiplier {spent['noise-multiplier']:.4g}"
    if "noise-cohort" in spent:
        text += (
            f"; a study: that is of a federation with {spent['noise-cohort']} clients a round, "
            "and those of this run are not protected by it"
        )
    return text


def measured(summary: Summary, directory: RunDirectory) -> Metrics:
    """Collect the metrics of the result, with the macro-F1 where classes are known."""
    final = dict(summary["metrics"]["final"])
    if classes := classes_of(directory.path, directory.read_rounds()):
        final["macro-F1"] = classes["macro-f1"]
    return final


def _channels(folder: Path) -> int:
    """Count the channels of the images that the model of a folder takes; 0 if it takes none."""
    path = folder / PROCESSOR
    return len(read_json(path, str(folder)).get("image_mean", "RGB")) if path.is_file() else 0


def _place(spec: Mapping[str, Any]) -> str:
    """Say where a backbone or data come from; of a folder its last name is enough for others."""
    path = Path(spec.get("name", ""))  # bundled data has none
    if spec["source"] == "hub" and (path.is_absolute() or path.is_dir()):
        return f"{path.name} (a folder)"
    return f"{spec['name']} ({spec['source']})" if spec.get("name") else str(spec["source"])


def _cell(value: object) -> str:
    """Write a value such as a path so that Markdown takes it for one cell of plain text."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(value).split()))


def _literal(value: object) -> str:
    """Write a text as one of Python, which a JSON text is."""
    return json.dumps(value, ensure_ascii=False)
