"""Write a model card: what a folder is, where it comes from, how good it is, how to load it."""

from pathlib import Path
from typing import Any

from ravan_flwr.runs.directory import RunDirectory, write_atomically
from ravan_flwr.tasks import get_task


def write_card(folder: Path, form: str, directory: RunDirectory) -> None:
    """Write the card of an exported folder, its `README.md`."""
    config, summary = directory.read_config(), directory.read_summary()
    final = summary["metrics"]["final"]
    scores = ", ".join(f"{name} {value:.4f}" for name, value in final.items()) or "not evaluated"
    partition = config["partition"]
    if partition.startswith("dirichlet"):
        partition += f" {config['partition-alpha']:g}"
    method = config["method"] + (f", rank {summary['rank']}" if summary["rank"] else "")
    rows = {
        "backbone": f"{config['model']['name']} ({config['model']['source']})",
        "data": f"{config['data']['source']}, {summary['num-clients']} clients, {partition}",
        "method": method + (f", {config['heads']} heads" if config["method"] == "ravan" else ""),
        "classifier": config["classifier"],
        "rounds": f"{summary['rounds']}, {config['clients-per-round']} clients a round, "
        f"{config['local-steps']} local steps of {config['batch-size']}",
        "trained parameters": f"{summary['trainable-parameters']:,}",
        "result": scores,
        "seed": summary["seed"],
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    examples = {
        "server": "the server's test examples",
        "clients": "examples that clients held back",
    }
    library = {"peft": "peft", "merged": "transformers"}[form]
    text = CARD.format(
        library=library, task=config["task"], table=table, how=_how(form, config),
        examples=examples[config["evaluate-on"]],
    )  # fmt: skip
    write_atomically(folder / "README.md", text.encode())


def _how(form: str, config: dict[str, Any]) -> str:
    """Return the text that says how to load the folder."""
    model, known = config["model"], get_task(config["task"]).auto_class
    if form == "merged":
        return MERGED.format(known=known)
    if model["source"] == "bundled":
        return PEFT.format(backbone=BUNDLED.format(preset=config["preset"]))
    given = [f'"{model["name"]}"']
    given += [f'revision="{model["revision"]}"'] if model["revision"] else []
    given += [f"num_labels={len(config['data']['labels'])}"] if config["data"]["labels"] else []
    backbone = f"from transformers import {known}\n\n"
    return PEFT.format(backbone=f"{backbone}backbone = {known}.from_pretrained({', '.join(given)})")


MERGED = """\
```python
from transformers import {known}

model = {known}.from_pretrained("this folder")
```"""

PEFT = """\
Load it onto the backbone that it was trained on, with as many labels:

```python
from peft import PeftModel
{backbone}
model = PeftModel.from_pretrained(backbone, "this folder")
```"""

BUNDLED = """\
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.network import build_network
from ravan_flwr.training.workbench import make_task

config = read_config({{"preset": "{preset}"}})
backbone = build_network(config.model, make_task(config), config.seed).network"""

CARD = """\
---
library_name: {library}
tags: [federated-learning, flower, ravan-flwr, {task}]
---
# A federated fine-tuning, by ravan-flwr

The examples stayed on the clients; what they sent was averaged.

| | |
| --- | --- |
{table}

The result is that after the last round, on {examples}.

{how}
"""
