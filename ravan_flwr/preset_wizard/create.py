"""Create a preset for a task of one's own, and report what was found."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import yaml

from ravan_flwr.config.keys import RUN
from ravan_flwr.config.preset import LORA_RANK, run_defaults
from ravan_flwr.config.presets import (
    PresetPath,
    conf_folder,
    new_file,
    read_preset,
    refuse_if_there,
)
from ravan_flwr.data.hub import NotHereError
from ravan_flwr.preset_wizard.columns import NamedColumns
from ravan_flwr.preset_wizard.data_summary import DataSummary, look_at_data
from ravan_flwr.preset_wizard.model_summary import COVERED, ModelSummary, look_at_model
from ravan_flwr.tasks import TASKS
from ravan_flwr.templates import filled

_EXAMPLES_A_CLIENT = 20  # fewer of them teach a client nothing


def preset_text(
    name: str, data: DataSummary, model: ModelSummary, preset: str, clients: int = 0
) -> str:
    """Write the file; `preset` is how commands name it, 0 clients as many as the data feed."""
    task = TASKS[model.task]
    return filled(
        Path(__file__).with_name("preset.yaml.jinja"),
        {"text": _text},
        name=name,
        preset=preset,
        data=data,
        model=model,
        spec=data.spec,
        task=task,
        most=COVERED,
        run=run_defaults(task) | run_of(data, clients),
        budgets=LORA_RANK,
    )


def run_of(data: DataSummary, requested_clients: int = 0) -> dict[str, int]:
    """Choose how many clients share the examples, unless asked, and how long each trains."""
    train = data.number("train")
    most, chosen, steps, batch = (
        int(RUN[key]) for key in ("num-clients", "clients-per-round", "local-steps", "batch-size")
    )
    clients = requested_clients or max(2, min(most, train // _EXAMPLES_A_CLIENT))
    twice = -(-2 * train // (clients * batch))  # through all its examples
    return {
        "num-clients": clients,
        # Devices that are there train in every round; simulated ones take turns.
        "clients-per-round": min((requested_clients and most) or chosen, clients),
        "local-steps": max(5, min(steps, twice)),
    }


def _text(value: str) -> str:
    """Write a text so that YAML reads it as the same text, whatever is in it."""
    return str(yaml.safe_dump(value, default_style='"', width=10**9)).strip()


def new_preset(
    name: str, data: str, model: str, *, names: NamedColumns | None = None, subset: str = "",
    targets: str = "", chat_template: str = "", clients: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Write `conf/NAME.yaml`, and yield lines that say what was seen and what to do next."""
    path = new_file(name)
    with _telling_of("--data", data):
        data_summary = look_at_data(data, subset, names or NamedColumns(), chat_template)
    yield from _about_data(data_summary, clients)
    with _telling_of("--model", model):
        model_summary = look_at_model(model, data_summary, targets)
    yield from _about_model(model_summary)
    short = name if path.parent == conf_folder() else os.path.relpath(path)
    _write(name, path, preset_text(name, data_summary, model_summary, short, clients))
    yield f"wrote  {path}"
    yield f"next   ravan-flwr plan preset={short}"
    yield f"       ravan-flwr tune preset={short} method=ravan"
    yield f"       ravan-flwr simulate preset={short}"
    if clients and data_summary.held_back:
        yield "devices without a test part on the server: add evaluate-on=clients to the run"


@contextmanager
def _telling_of(option: str, place: str) -> Iterator[None]:
    """Say of what is neither a folder nor at hand what to do, as long as there is no preset."""
    try:
        yield
    except NotHereError as error:
        raise ValueError(
            f"{error.problem}; expected a folder, of which there is none of that name here, or an "
            f"id of the hub and a connection; correct {option} {place}"
        ) from None


def _write(name: str, path: Path, text: str) -> None:
    """Write a new file, whole or not at all, and read it as a run will."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp.yaml")
    try:
        draft.write_text(text, encoding="utf-8")
        read_preset(PresetPath(draft))
        try:
            os.link(draft, path)  # unlike a rename, it replaces nothing
        except OSError:  # there is a file now, or no link on this file system
            refuse_if_there(name, path)
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _about_data(data: DataSummary, requested_clients: int) -> Iterator[str]:
    spec, train, test = data.spec, data.number("train"), data.number("test")
    where = f"{spec.name}{f' ({spec.subset})' if spec.subset else ''}"
    part = "more to test: there is no test part" if data.held_back else "to test"
    yield f"data   {where}: {data.kind}, {train:,} examples to train, {test:,} {part}"
    columns = ", ".join(f"{role} from column {column!r}" for role, column in spec.columns)
    unused = sorted(set(data.train.column_names) - {column for _, column in spec.columns})
    yield f"       {columns}" + (f"; not used: {', '.join(unused)}" if unused else "")
    if data.unused:
        yield f"       splits that are not used: {', '.join(data.unused)}"
    if spec.labels:
        counts = sorted(data.counts["train"].get(label, 0) for label in spec.labels)
        least, most = counts[0], counts[-1]
        yield f"       {len(spec.labels)} classes with {least:,} to {most:,} examples each"
    for warning in data.warnings():
        yield f"       WARNING: {warning}"
    clients = run_of(data, requested_clients)["num-clients"]
    if train < clients * 10:
        yield f"       WARNING: {clients} clients share {train} examples, which is very little"


def _about_model(model: ModelSummary) -> Iterator[str]:
    yield (
        f"model  {model.spec.name}: {model.architecture}, {model.size / 1e6:,.1f} million "
        f"parameters; adapts {len(model.layers)} matrices of {model.sides}"
    )
    yield f"       {model.layers[0]} ... {model.layers[-1]}"
    if Path(model.spec.name).is_relative_to(Path.home()):
        yield (
            "       WARNING: it lies in a home folder, which services on devices cannot read; for "
            "a deployment put it elsewhere, under one path on every machine"
        )
    if model.lengths is None:
        yield f"       images are brought to {model.image_size}"
        return
    lengths = model.lengths
    yield (
        f"       tokens of a text: half have {lengths.median} at most, {COVERED} % have "
        f"{lengths.covered}, the longest {lengths.longest}; {model.max_length} are read"
    )
    if lengths.warning:
        yield f"       WARNING: {lengths.warning}"
