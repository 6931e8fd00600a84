"""Evaluate a run's result on other examples."""

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pandas as pd

from ravan_flwr.config.presets import chosen_data, parse_location
from ravan_flwr.config.run_config import recorded_config
from ravan_flwr.data.examples import other_examples
from ravan_flwr.messages.plain_text import plain
from ravan_flwr.methods import METHODS
from ravan_flwr.methods.base import Tensors
from ravan_flwr.results.classes import class_report, class_table
from ravan_flwr.runs.checkpoint import load_checkpoint, load_fixed, load_personal_states
from ravan_flwr.runs.directory import RunDirectory
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks.tally import Tally
from ravan_flwr.training.model_and_data import ModelAndData

log = logging.getLogger(__name__)


def evaluate(
    run: Path | str, data: Path | str, client: int | None = None, model: Path | str | None = None
) -> dict[str, Any]:
    """Return the metrics of a run's result on other examples, with counts by class.

    `data` is a folder, a file, or an id of the hub, with the columns of the run's preset; `client`
    and `model` are as for `result_of`. The keys are `run`, `data`, `split`, `examples`, `metrics`;
    for a classification also `classes` and `confusion`.
    """
    with result_of(run, client, model) as loaded:
        task = loaded.task
        spec = _make_spec(str(data), task.data)
        examples, split = other_examples(spec)
        if split == "all examples" and _is_trained_on(spec.name, task.data):
            log.warning("%s: the run trained on most of these; the metrics are optimistic", data)
        tally = Tally() if task.classifies else None
        encoded = task.encode(examples)
        measured = loaded.evaluate(tally, {"data": encoded})
    content: dict[str, Any] = {
        "run": str(run),
        "data": str(data),
        "split": split,
        "examples": len(encoded),
        "metrics": dict(measured),
    }
    if tally is not None:
        counted = class_report(tally, task.data.labels)
        content |= {key: counted[key] for key in _COUNTED if key in counted}
    return content


_COUNTED = ("classes", "confusion", "no-label")


def _is_trained_on(name: str, spec: DataSpec) -> bool:
    """Return whether data are those of a run, or the file of its training split."""
    here, of_run = (Path(text).expanduser().resolve() for text in (name, spec.name))
    return bool(spec.name) and (here == of_run or (here.parent, here.stem) == (of_run, spec.train))


def _make_spec(data: str, spec: DataSpec) -> DataSpec:
    """Return the spec of other data, with the columns of the run's data."""
    file = Path(data).expanduser()
    if file.is_file():
        return dataclasses.replace(spec, source="hub", name=str(file), revision="")
    return chosen_data(dataclasses.replace(spec, source="hub"), data)


def as_text(content: dict[str, Any]) -> str:
    """Format an evaluation for a terminal."""
    metrics = "  ".join(f"{name} {value:.4f}" for name, value in content["metrics"].items())
    lines = [f"{content['examples']} examples ({content['split']} of {content['data']})", metrics]
    if "classes" in content:
        table = class_table(content | content["metrics"])
        # Names of classes come from the data, so they are escaped.
        rows = [[plain(str(cell), 60) for cell in row] for row in table["rows"]]
        lines += ["", pd.DataFrame(rows, columns=table["heads"]).to_string(index=False)]
    return "\n".join(lines) + "\n"


@contextmanager
def result_of(
    run: Path | str, client: int | None = None, model: Path | str | None = None
) -> Iterator[ModelAndData]:
    """Build the model and data of a run; within the block its model holds the last round's state.

    Where each client has a model of its own (`fedsa-lora`, `local`), `client` is the partition of
    the client. `model` is the folder of the pretrained model, if it has moved since the run.
    """
    directory = RunDirectory.open(Path(run), "result")
    config = recorded_config(directory.read_config(), str(directory.path))
    if model is not None:
        name, _ = parse_location("model", str(Path(model).expanduser().absolute()))
        moved = dataclasses.replace(config.model, source="hub", name=name, revision="")
        config = dataclasses.replace(config, model=moved)
    _check_client(client, config.method)
    loaded = ModelAndData(config)
    checkpoint = load_checkpoint(directory.checkpoints)
    personal = None if client is None else _personal_state(directory, checkpoint.round, client)
    fixed = load_fixed(directory.checkpoints)
    if fixed is not None:
        loaded.model.load_fixed(fixed)
    loaded.model.check_fingerprint(checkpoint.memory, str(directory.path))
    with loaded.model.holding(checkpoint.state, personal):
        yield loaded


def _check_client(client: int | None, method: str) -> None:
    """Raise ValueError if a client is missing, or given without need, for this method."""
    personalised = method in METHODS and METHODS[method].personalised
    if personalised and client is None:
        raise ValueError(
            f"method {method!r} has a model for each client, and none of the server's: got no "
            "client, expected the number of a client; name it with --client N"
        )
    if not personalised and client is not None:
        raise ValueError(
            f"client = {client}: method {method!r} has one model for all, expected no client; "
            "leave it out"
        )


def _personal_state(directory: RunDirectory, last_round: int, client: int) -> Tensors:
    """Load a client's personal parameters, which only runs in one process keep."""
    states = load_personal_states(directory.checkpoints, last_round)
    if states is None:
        raise ValueError(
            f"client = {client}: {directory.checkpoints} has no clients-{last_round:06d}"
            ".safetensors, expected the clients' personal parameters, which only runs in one "
            "process have; in other runs they are on the devices, and deliver=true makes each "
            "device keep its model"
        )
    if client not in states:
        clients = ", ".join(map(str, sorted(states))) or "none"
        raise ValueError(
            f"client = {client}: it has no personal parameters, since it has not trained; expected "
            f"one of {clients}"
        )
    return states[client]
