"""Write a model card: what a folder contains, its origin, its metrics, and how to load it."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ravan_flwr.data.model_folder import PROCESSOR, read_json
from ravan_flwr.files import write_atomically
from ravan_flwr.methods import METHODS
from ravan_flwr.runs.console import uploads_seen
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.runs.record import Summary
from ravan_flwr.tasks import get_task
from ravan_flwr.templates import fill_template


def write_card(
    folder: Path, form: str, directory: RunDirectory, config: dict[str, Any] | None = None
) -> None:
    """Write the card of a run's result as `README.md`; `config` replaces the run's own."""
    summary = directory.read_summary()
    config = config or directory.read_config()
    fill_card(folder, form, config, summary)


def fill_card(folder: Path, form: str, config: dict[str, Any], summary: Summary) -> None:
    """Write a card from a run's settings and its summary."""
    text = fill_template(
        Path(__file__).with_name("card.md"),
        {"cell": _cell, "literal": _literal, "source": _source},
        form=form,
        config=config,
        summary=summary,
        final=summary["metrics"]["final"],
        task=get_task(config["task"]),
        method=METHODS[config["method"]],
        channels=_channels(folder),
        where=_PLACES[summary.get("simulated")],
        uploads=uploads_seen(config),
        privacy=describe_privacy(summary) if "epsilon" in summary else "",
    )
    write_atomically(folder / "README.md", text.encode(errors="backslashreplace"))


# By whether the clients were simulated; None: an older run, which does not say.
_PLACES = {
    None: "Each client trained on its own examples",
    False: "The examples stayed on the clients",
    True: "Clients were simulated on one machine, with parts of one data set",
}


def describe_privacy(spent: Mapping[str, Any]) -> str:
    """Describe a run's privacy guarantee, for its clients, examples, or a larger federation."""
    unit = "each client"
    if spent.get("unit") == "example":
        unit = "each example of a client, the largest of all clients'"
    text = f"epsilon {spent['epsilon']:.3f}, delta {spent['delta']:g} for {unit}, "
    text += f"noise multiplier {spent['noise-multiplier']:.4g}"
    if "noise-cohort" in spent:
        text += (
            f"; a study: this holds for a federation with {spent['noise-cohort']} clients a "
            "round, and does not protect the clients of this run"
        )
    return text


def _channels(folder: Path) -> int:
    """Return the number of image channels of the model in a folder; 0 if it takes no images."""
    path = folder / PROCESSOR
    return len(read_json(path, str(folder)).get("image_mean", "RGB")) if path.is_file() else 0


def _source(spec: Mapping[str, Any]) -> str:
    """Describe the source of a backbone or data; a folder is given without its parents."""
    path = Path(spec.get("name", ""))  # bundled data has none
    if spec["source"] == "hub" and (path.is_absolute() or path.is_dir()):
        return f"{path.name} (a folder)"
    return f"{spec['name']} ({spec['source']})" if spec.get("name") else str(spec["source"])


def _cell(value: object) -> str:
    """Escape a value, such as a path, so that Markdown shows it as plain text in one cell."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(value).split()))


def _literal(value: object) -> str:
    """Return a text as a literal of Python, which a JSON string is."""
    return json.dumps(value, ensure_ascii=False)
