"""Create a preset for the user's own task, and report what was found."""

import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import yaml

from ravan_flwr.config.keys import RUN
from ravan_flwr.config.preset import LORA_RANK, Preset, run_defaults
from ravan_flwr.config.presets import conf_folder, new_preset_path
from ravan_flwr.data.examples import label_numbers
from ravan_flwr.data.rows import list_some
from ravan_flwr.files import write_atomically
from ravan_flwr.preset_wizard.data_summary import DataSummary, summarise_data
from ravan_flwr.preset_wizard.model_summary import COVERED, ModelSummary, summarise_model
from ravan_flwr.runs.console import log_to_stdout
from ravan_flwr.tasks import TASKS
from ravan_flwr.templates import fill_template


def new_preset(
    name: str, data: str, model: str, *, names: Mapping[str, str] | None = None, subset: str = "",
    targets: str = "", chat_template: str = "", clients: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Write `conf/NAME.yaml`, and yield lines with what was found and what to do next."""
    path = new_preset_path(name)
    summary = summarise_data(data, subset, names or {}, chat_template)
    yield from _about_data(summary)
    if clients > len(summary.train):
        raise ValueError(
            f"--clients {clients}: the data have {len(summary.train)} examples to train, expected "
            "at most one client for each, so that the preset can be simulated; give a smaller "
            "number, which limits no deployment of devices with examples of their own"
        )
    log_to_stdout()  # that all linear layers are adapted
    model_summary = summarise_model(model, summary, targets)
    yield f"model  {model_summary.spec.name}: {model_summary.description}"
    if model_summary.max_length:
        yield f"       {model_summary.max_length} tokens of a text are read"
    short = name if path.parent == conf_folder() else os.path.relpath(path)
    text = preset_text(name, summary, model_summary, short, clients)
    Preset.read(path, yaml.safe_load(text))  # as a run does
    write_atomically(path, text.encode())
    yield f"wrote  {path}"
    yield "next   plan prints a run's time; tune takes nine such runs or more, and is optional:"
    yield f"       ravan-flwr plan preset={short}"
    yield f"       ravan-flwr tune preset={short} method=ravan"
    yield f"       ravan-flwr simulate preset={short}"


def _about_data(data: DataSummary) -> Iterator[str]:
    spec = data.spec
    use = "more to test: there is no test split" if data.test_from_train else "to test"
    yield f"data   {spec.name}: {len(data.train):,} examples to train, {len(data.test):,} {use}"
    columns = ", ".join(f"{role} from column {column!r}" for role, column in spec.columns)
    yield f"       {columns}" + (f"; not used: {', '.join(data.unused)}" if data.unused else "")
    if spec.labels:
        yield f"       {len(spec.labels)} classes"
        trained = {*label_numbers(data.train, spec.labels, "labels")}
        tested = {*label_numbers(data.test, spec.labels, "labels")}
        if untrained := [spec.labels[number] for number in sorted(tested - trained)]:
            yield f"       no example to train has {list_some(untrained, 5)}, as some to test have"


def preset_text(
    name: str, data: DataSummary, model: ModelSummary, preset: str, clients: int = 0
) -> str:
    """Return the file's text; commands call it `preset`. With 0 clients it has the default."""
    task = TASKS[model.task]
    run, max_clients = run_defaults(task), int(RUN["num-clients"])
    if clients:  # real devices train in every round; simulated clients take turns
        run |= {"num-clients": clients, "clients-per-round": min(max_clients, clients)}
    else:
        run["num-clients"] = min(max_clients, len(data.train))
        run["clients-per-round"] = min(int(RUN["clients-per-round"]), len(data.train))
    # Few examples need fewer steps: about five passes of an average client over its own.
    batches = len(data.train) / (int(run["num-clients"]) * int(run["batch-size"]))
    run["local-steps"] = min(int(run["local-steps"]), max(10, math.ceil(5 * batches)))
    return fill_template(
        Path(__file__).with_name("preset.yaml.jinja"),
        {"text": _text},
        name=name,
        preset=preset,
        data=data,
        model=model,
        spec=data.spec,
        task=task,
        covered=COVERED,
        run=run,
        default_steps=int(RUN["local-steps"]),
        budgets=LORA_RANK,
    )


def _text(value: str) -> str:
    """Return a text quoted for YAML, whatever its characters."""
    return str(yaml.safe_dump(value, default_style='"', allow_unicode=True, width=10**9)).strip()
