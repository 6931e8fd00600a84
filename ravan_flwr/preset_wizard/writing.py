"""Write a preset as a file for people: a comment beside each line."""

from collections.abc import Sequence

import yaml

from ravan_flwr.config.keys import RUN
from ravan_flwr.config.preset import LORA_RANK, run_defaults
from ravan_flwr.preset_wizard.data_summary import DataSummary
from ravan_flwr.preset_wizard.model_summary import COVERED, ModelSummary
from ravan_flwr.tasks import TASKS
from ravan_flwr.templates import filled

_WIDTH = 110  # columns of a line of labels
_EXAMPLES_A_CLIENT = 20  # fewer of them teach a client nothing

PRESET = """\
# {{ name }}: drafted by `ravan-flwr new` from the data and the model; change what you like.
# What is not here has a default: docs/your-own-task.md lists all fields.
task: {{ model.task }}  # what is learned, and how it is measured

model:
{% if model.spec.source == "bundled" %}
  source: bundled  # it comes with ravan-flwr
  name: {{ model.spec.name | text }}  # of the app's own
{% else %}
  name: {{ model.spec.name | text }}  # an id of the hub, or a folder (on every machine)
{% endif %}
{% if model.spec.revision %}
  revision: {{ model.spec.revision | text }}  # of the hub
{% endif %}
{% if model.spec.targets %}
  targets: {{ model.spec.targets | join(",") | text }}  # ends of the names of the layers to adapt
{% endif %}

data:
  name: {{ spec.name | text }}  # an id of the hub, or a folder on every machine that reads it
{% if spec.subset %}
  subset: {{ spec.subset | text }}  # of the data set
{% endif %}
{% if spec.revision %}
  revision: {{ spec.revision | text }}  # of the hub
{% endif %}
  columns: {{ columns }}  # what for: which column
{% if prompts %}
  prompt:  # before the answer; the first of which an example has all columns
{% for one in prompts %}
    - {{ one | text }}
{% endfor %}
{% endif %}
{% if spec.chat_template %}
  chat-template: {{ spec.chat_template | text }}  # in place of the tokenizer's
{% endif %}
{% if splits %}
  splits: {{ splits }}  # of the clients: of the server
{% endif %}
{% if data.held_back %}
  test-share: {{ spec.test_share }}  # {{ of_what }}held back for the server's test
{% endif %}
{% if model.lengths %}
  max-length: {{ model.max_length }}  # tokens that are read of a text; {{ covered }}
{% endif %}
{% if model.target_length %}
  target-length: {{ model.target_length }}  # tokens of the longest label
{% endif %}
{% if spec.labels %}
  labels:  # in the order of their numbers, the same on every device
{{ labels }}
{% endif %}

run:
  num-clients: {{ run["num-clients"] }}  # simulated clients, which share the training examples
  clients-per-round: {{ run["clients-per-round"] }}  # of them train in each round
  num-rounds: {{ run["num-rounds"] }}
  local-steps: {{ run["local-steps"] }}  # optimiser steps of a client in each round
  batch-size: {{ run["batch-size"] }}  # examples in each step
{% if spec.labels %}
  partition: {{ run["partition"] }}  # the smaller, the more clients differ; or iid
{% endif %}
  heads: {{ model.heads }}  # of the method ravan, in each adapted layer
{% if not writes %}
  classifier: {{ run["classifier"] }}  # trained along with the adapters; or frozen
{% endif %}

parameter-budgets:  # as many trainable parameters as a LoRA of this rank
{% for budget, rank in budgets.items() %}
  {{ budget }}: {lora-rank: {{ rank }}}
{% endfor %}

learning-rate: {}  # by method; empty: the default. Better: ravan-flwr tune preset={{ preset }}
"""


def preset_text(name: str, data: DataSummary, model: ModelSummary, preset: str) -> str:
    """Write the file; `preset` is how commands name it."""
    spec = data.spec
    splits = {"train": spec.train, "test": dict(spec.tests)["test"]}
    usual = splits == {"train": "train", "test": "test"}
    return filled(
        PRESET,
        {"text": _text},
        name=name,
        preset=preset,
        data=data,
        model=model,
        spec=spec,
        columns=_mapping(dict(spec.columns)),
        splits="" if usual else _mapping(splits),
        prompts=[] if spec.prompts == ("{prompt}",) else spec.prompts,
        of_what="of each class, " if spec.labels else "",
        writes=bool(TASKS[model.task].target_length),
        covered=_covered(model),
        labels=_labels(spec.labels),
        run=run_defaults(TASKS[model.task]) | run_of(data),
        budgets=LORA_RANK,
    )


def run_of(data: DataSummary) -> dict[str, int]:
    """Choose how many simulated clients share the examples, and how long each trains."""
    train = data.number("train")
    most, chosen, steps, batch = (
        int(RUN[key]) for key in ("num-clients", "clients-per-round", "local-steps", "batch-size")
    )
    clients = max(2, min(most, train // _EXAMPLES_A_CLIENT))
    twice = -(-2 * train // (clients * batch))  # through all its examples
    return {
        "num-clients": clients,
        "clients-per-round": min(chosen, clients),
        "local-steps": max(5, min(steps, twice)),
    }


def _covered(model: ModelSummary) -> str:
    if model.lengths is None:
        return ""
    short = model.lengths.covered > model.max_length
    told = f"{COVERED} % have {model.lengths.covered} at most"
    return told + (", the model reads no more" if short else "")


def _labels(labels: Sequence[str]) -> str:
    """List the labels, with line breaks between them alone."""
    lines, line = [], "    ["
    for label in map(_text, labels):
        if len(line) + len(label) > _WIDTH and not line.endswith("["):
            lines.append(line.rstrip())
            line = "     "
        line += f"{label}, "
    return "\n".join([*lines, line.removesuffix(", ") + "]"])


def _mapping(values: dict[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {_text(value)}" for key, value in values.items()) + "}"


def _text(value: str) -> str:
    """Write a text so that YAML reads it as the same text, whatever is in it."""
    return str(yaml.safe_dump(value, default_style='"', width=10**9)).strip()
