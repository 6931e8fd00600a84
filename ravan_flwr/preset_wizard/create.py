"""Create a preset for the user's own task, and report what was found."""

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
    new_preset_path,
    read_preset,
    refuse_existing,
)
from ravan_flwr.data.hub import NotAvailableError
from ravan_flwr.preset_wizard.columns import NamedColumns
from ravan_flwr.preset_wizard.data_summary import DataSummary, summarise_data
from ravan_flwr.preset_wizard.model_summary import COVERED, ModelSummary, summarise_model
from ravan_flwr.tasks import TASKS
from ravan_flwr.templates import fill_template

_EXAMPLES_A_CLIENT = 20  # fewer of them teach a client nothing


def preset_text(
    name: str, data: DataSummary, model: ModelSummary, preset: str, clients: int = 0
) -> str:
    """Return the file's text; commands call it `preset`. With 0 clients the data set the number."""
    task = TASKS[model.task]
    return fill_template(
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
    """Return the numbers of clients, unless requested, of clients a round and of local steps."""
    train = data.number("train")
    most, chosen, steps, batch = (
        int(RUN[key]) for key in ("num-clients", "clients-per-round", "local-steps", "batch-size")
    )
    clients = requested_clients or max(2, min(most, train // _EXAMPLES_A_CLIENT))
    two_passes = -(-2 * train // (clients * batch))  # steps over a client's examples
    return {
        "num-clients": clients,
        # Real devices train in every round; simulated clients take turns.
        "clients-per-round": min((requested_clients and most) or chosen, clients),
        "local-steps": max(5, min(steps, two_passes)),
    }


def _text(value: str) -> str:
    """Return a text quoted for YAML, whatever its characters."""
    return str(yaml.safe_dump(value, default_style='"', width=10**9)).strip()


def new_preset(
    name: str, data: str, model: str, *, names: NamedColumns | None = None, subset: str = "",
    targets: str = "", chat_template: str = "", clients: int = 0,
) -> Iterator[str]:  # fmt: skip
    """Write `conf/NAME.yaml`, and yield lines with what was found and what to do next."""
    path = new_preset_path(name)
    with _explaining("--data", data):
        data_summary = summarise_data(data, subset, names or NamedColumns(), chat_template)
    yield from _about_data(data_summary, clients)
    with _explaining("--model", model):
        model_summary = summarise_model(model, data_summary, targets)
    yield from _about_model(model_summary)
    short = name if path.parent == conf_folder() else os.path.relpath(path)
    _write(name, path, preset_text(name, data_summary, model_summary, short, clients))
    yield f"wrote  {path}"
    yield f"next   ravan-flwr plan preset={short}"
    yield f"       ravan-flwr tune preset={short} method=ravan"
    yield f"       ravan-flwr simulate preset={short}"
    if clients and data_summary.test_from_train:
        yield "for devices without a test split on the server, add evaluate-on=clients to the run"


@contextmanager
def _explaining(option: str, location: str) -> Iterator[None]:
    """Raise ValueError with advice if a location is no folder and not available from the hub."""
    try:
        yield
    except NotAvailableError as error:
        raise ValueError(
            f"{error.problem}; expected an existing folder, or an id of the hub and a connection; "
            f"correct {option} {location}"
        ) from None


def _write(name: str, path: Path, text: str) -> None:
    """Write a new file, whole or not at all, and check it as a run does."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.tmp.yaml")
    try:
        draft.write_text(text, encoding="utf-8")
        read_preset(PresetPath(draft))
        try:
            os.link(draft, path)  # unlike a rename, it replaces nothing
        except OSError:  # the file exists now, or the file system has no links
            refuse_existing(name, path)
            draft.rename(path)
    finally:
        draft.unlink(missing_ok=True)


def _about_data(data: DataSummary, requested_clients: int) -> Iterator[str]:
    spec, train, test = data.spec, data.number("train"), data.number("test")
    where = f"{spec.name}{f' ({spec.subset})' if spec.subset else ''}"
    use = "more to test: there is no test split" if data.test_from_train else "to test"
    yield f"data   {where}: {data.kind}, {train:,} examples to train, {test:,} {use}"
    columns = ", ".join(f"{role} from column {column!r}" for role, column in spec.columns)
    unused = sorted(set(data.train.column_names) - {column for _, column in spec.columns})
    yield f"       {columns}" + (f"; not used: {', '.join(unused)}" if unused else "")
    if data.unused:
        yield f"       splits that are not used: {', '.join(data.unused)}"
    if spec.labels:
        counts = sorted(data.counts["train"].get(label, 0) for label in spec.labels)
        least, most = counts[0], counts[-1]
        span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        yield f"       {len(spec.labels)} classes with {span} examples each"
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
            "       WARNING: it is in a home folder, which services on devices cannot read; for "
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
