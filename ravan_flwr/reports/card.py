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

EXAMPLES = {"server": "the server's test examples", "clients": "the clients' validation splits"}
LIBRARIES = {"peft": "peft", "ravan": "peft", "merged": "transformers"}


def write_card(folder: Path, form: str, directory: RunDirectory) -> None:
    """Write the card of a run's result as `README.md`."""
    summary = directory.read_summary()
    fill_card(folder, form, directory.read_config(), summary, measured(summary, directory))


def fill_card(
    folder: Path, form: str, config: dict[str, Any], summary: Summary, final: Metrics
) -> None:
    """Write a card of these settings, this summary and these metrics of the result."""
    one_channel = _channels(folder) == 1
    text = filled(
        Path(__file__).with_name("card.md"),
        {"cell": _cell, "literal": _literal},
        library=LIBRARIES[form],
        task=config["task"],
        origin=_origin(config["method"]),
        rows=_rows(config, summary, final),
        examples=EXAMPLES[config["evaluate-on"]],
        about=_about(config, form, one_channel=one_channel),
        network=get_task(config["task"]).auto_class if form == "merged" else "",
        **_code(config, form, one_channel=one_channel),
    )
    write_atomically(folder / "README.md", text.encode(errors="backslashreplace"))


def _origin(method: str) -> str:
    """Say in a sentence or two where the model comes from."""
    listed = METHODS[method]
    if listed.personalised:
        return (
            "The examples stayed on the clients, and each client has a model of its own. This is "
            "that of one client; the result in the table is the mean over all."
        )
    if listed.pools:
        return "One client trained on the examples of all: the reference that federation has."
    return "The examples stayed on the clients; what they sent was averaged."


def _rows(config: dict[str, Any], summary: Summary, final: Metrics) -> dict[str, object]:
    """Collect the table's rows."""
    partition = config["partition"].replace(":", " ")
    method = config["method"] + (f", rank {summary['rank']}" if summary["rank"] else "")
    clients = config["clients-per-round"]
    if METHODS[config["method"]].everyone:
        clients = summary["num-clients"]
    heads = f", {config['heads']} heads" if METHODS[config["method"]].has_heads else ""
    rows: dict[str, object] = {
        "backbone": f"{config['model']['name']} ({config['model']['source']})",
        "data": f"{config['data']['source']}, {summary['num-clients']} clients, {partition}",
        "method": method + heads,
        "classifier": config["classifier"],
        "rounds": f"{summary['rounds']}, {clients} clients a round, "
        f"{_work(config)} of {config['batch-size']} examples",
        "trained parameters": f"{summary['trainable-parameters']:,}",
        "result": ", ".join(f"{k} {v:.4f}" for k, v in final.items()) or "not evaluated",
        "seed": summary["seed"],
    }
    if "epsilon" in summary:
        rows["privacy"] = privacy_of(summary)
    if seen := uploads_seen(config):
        rows["uploads"] = seen
    return rows


def privacy_of(spent: Mapping[str, Any]) -> str:
    """Say what a private run promises, and whom: its clients, their examples, or a larger run's."""
    whom = "each client"
    if spent.get("unit") == "example":
        whom = "each example of a client, the largest of all clients'"
    told = f"epsilon {spent['epsilon']:.3f}, delta {spent['delta']:g} for {whom}, "
    told += f"noise multiplier {spent['noise-multiplier']:.4g}"
    if (most := spent.get("epsilon-to-server-bound")) is not None:  # the exact one tells of cohorts
        told += f"; of a client, the server has seen epsilon {most:.3f} at most"
    if "noise-cohort" in spent:
        told += (
            f"; a study: that is of a federation with {spent['noise-cohort']} clients a round, "
            "and those of this run are not protected by it"
        )
    return told


def _work(config: Mapping[str, Any]) -> str:
    """Say how long a client trains in a round; the configs of older runs know steps alone."""
    if (passes := config.get("local-epochs")) is None:
        return f"{config['local-steps']} local steps"
    return f"{passes:g} local epoch{'s' * (passes != 1)} in batches"


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


def _cell(value: object) -> str:
    """Write a value such as a path so that Markdown takes it for one cell of plain text."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(value).split()))


def _code(config: Mapping[str, Any], form: str, *, one_channel: bool) -> dict[str, Any]:
    """Collect what the template writes code from: the lines of transformers that use a result."""
    task, data, spec = get_task(config["task"]), config["data"], config["model"]
    adapter, bundled = form != "merged", spec["source"] == "bundled"
    labelled = adapter and bool(task.pipeline) and task.classifies  # a PEFT folder has no names
    names = {"pipeline" if task.pipeline else "AutoTokenizer"}
    if (adapter and not bundled) or not (adapter or task.pipeline):
        names.add(task.auto_class)
    prompt = data["prompts"][0] if data.get("prompts") else data.get("prompt", "")
    columns = dict(data.get("columns", ()))
    return {
        "form": form,
        "adapter": adapter,
        "bundled": bundled,
        "labelled": labelled,
        "names": ", ".join(sorted(names)),
        "pipeline": task.pipeline,
        "auto_class": task.auto_class,
        "spec": spec,
        "classes": len(data["labels"]) if labelled else 0,
        "conversation": not data.get("prompts"),
        "prompt": prompt,
        "values": ", ".join(f'{role}="a {role}"' for role in columns if f"{{{role}}}" in prompt),
        "target_length": data.get("target-length"),
        "pairs": "text-pair" in columns,
        "one_channel": one_channel and bool(task.pipeline),
    }


def _about(config: Mapping[str, Any], form: str, *, one_channel: bool) -> str:
    """Say in a sentence or two what the code does with an example."""
    pipeline = get_task(config["task"]).pipeline
    onto = "An adapter goes onto the backbone that it was trained on. " if form != "merged" else ""
    if one_channel:
        return onto + (
            "The model takes images of one channel, but a pipeline makes every image file one of "
            "three. So give it arrays of bytes, (height, width, 1), as here; "
            "`preprocessor_config.json` has the size, and how bytes become numbers."
        )
    if pipeline == "image-classification":
        return onto + (
            "The pipeline brings an image to the model's size, and scales it as the run did "
            "(`preprocessor_config.json`)."
        )
    if pipeline == "text-generation":
        return onto + (
            "The pipeline continues a conversation, by the tokenizer's chat template, or a text, "
            "which is to be written as the run's examples were."
        )
    if pipeline:
        return onto + (
            "The pipeline cuts a text off where the run did (`model_max_length` in "
            "`tokenizer_config.json`)."
        )
    if config["data"]["prompt"]:
        return onto + "The model writes a text; transformers 5 has no pipeline for that."
    return onto + "transformers 5 has no pipeline for what the model reads."


def _literal(value: object) -> str:
    """Write a text as one of Python, which a JSON text is."""
    return json.dumps(value, ensure_ascii=False)
