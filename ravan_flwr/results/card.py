"""Write a model card: what a folder holds, where it comes from, how good it is, how to load it."""

import json
import re
from pathlib import Path
from typing import Any

from jinja2 import Environment, StrictUndefined

from ravan_flwr.runs.directory import RunDirectory, write_atomically
from ravan_flwr.runs.record import Summary
from ravan_flwr.tasks import get_task

EXAMPLES = {"server": "the server's test examples", "clients": "examples that clients held back"}
LIBRARIES = {"peft": "peft", "merged": "transformers"}


def write_card(folder: Path, form: str, directory: RunDirectory) -> None:
    """Write the card of a run's result as `README.md`."""
    config, summary = directory.read_config(), directory.read_summary()
    text = _ENVIRONMENT.from_string(CARD).render(
        library=LIBRARIES[form],
        task=config["task"],
        rows=_rows(config, summary),
        examples=EXAMPLES[config["evaluate-on"]],
        form=form,
        known=get_task(config["task"]).auto_class,
        preset=config["preset"],
        model=config["model"],
        labels=len(config["data"]["labels"]),
    )
    write_atomically(folder / "README.md", text.encode(errors="backslashreplace"))


def _rows(config: dict[str, Any], summary: Summary) -> dict[str, object]:
    """Collect the table's rows."""
    final = summary["metrics"]["final"]
    partition = config["partition"]
    if partition.startswith("dirichlet"):
        partition += f" {config['partition-alpha']:g}"
    method = config["method"] + (f", rank {summary['rank']}" if summary["rank"] else "")
    return {
        "backbone": f"{config['model']['name']} ({config['model']['source']})",
        "data": f"{config['data']['source']}, {summary['num-clients']} clients, {partition}",
        "method": method + (f", {config['heads']} heads" if config["method"] == "ravan" else ""),
        "classifier": config["classifier"],
        "rounds": f"{summary['rounds']}, {config['clients-per-round']} clients a round, "
        f"{config['local-steps']} local steps of {config['batch-size']} examples",
        "trained parameters": f"{summary['trainable-parameters']:,}",
        "result": ", ".join(f"{k} {v:.4f}" for k, v in final.items()) or "not evaluated",
        "seed": summary["seed"],
    }


def _cell(value: object) -> str:
    """Write a value such as a path so that Markdown takes it for one cell of plain text."""
    return re.sub(r"([\\`*\[\]<>|])", r"\\\1", " ".join(str(value).split()))


# Markdown and Python code, not HTML: the filters below escape for these.
_ENVIRONMENT = Environment(
    autoescape=False,  # noqa: S701 (as said above)
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
_ENVIRONMENT.filters |= {"cell": _cell, "literal": json.dumps}  # a JSON text is one of Python, too

CARD = """\
---
library_name: {{ library }}
tags: [federated-learning, flower, ravan-flwr, {{ task }}]
---
# A federated fine-tuning, by ravan-flwr

The examples stayed on the clients; what they sent was averaged.

| | |
| --- | --- |
{% for name, value in rows.items() %}
| {{ name }} | {{ value | cell }} |
{% endfor %}

The result is that after the last round, on {{ examples }}.

{% if form == "merged" %}
```python
from transformers import {{ known }}

model = {{ known }}.from_pretrained("this folder")
```
{% else %}
Load it onto the backbone that it was trained on, with as many labels:

```python
from peft import PeftModel
{% if model.source == "bundled" %}
from ravan_flwr.config.run_config import read_config
from ravan_flwr.training.network import build_network
from ravan_flwr.training.workbench import make_task

config = read_config({"preset": {{ preset | literal }}})
backbone = build_network(config.model, make_task(config), config.seed).network
{% else %}
from transformers import {{ known }}

{% set revision = ", revision=" ~ (model.revision | literal) if model.revision else "" %}
{% set number = ", num_labels=" ~ labels if labels else "" %}
backbone = {{ known }}.from_pretrained({{ model.name | literal }}{{ revision }}{{ number }})
{% endif %}
model = PeftModel.from_pretrained(backbone, "this folder")
```
{% endif %}
"""
