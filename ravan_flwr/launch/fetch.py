"""Download what a preset needs of the hub, for devices without a connection later."""

from collections.abc import Iterator, Mapping
from typing import cast

from ravan_flwr.config.keys import AUTO, KEYS
from ravan_flwr.config.presets import own_preset, read_preset
from ravan_flwr.config.run_config import Config, read_config
from ravan_flwr.data.examples import load_splits
from ravan_flwr.data.hub_errors import NotHereError
from ravan_flwr.data.model_folder import fetch_model, model_folder
from ravan_flwr.data.other_examples import load_questions
from ravan_flwr.specs import Scalar


def fetch(settings: Mapping[str, Scalar]) -> Iterator[str]:
    """Bring model and data of these settings into the cache; a line for each that is there."""
    try:
        yield from _fetched(settings)
    except NotHereError as error:
        raise ValueError(
            f"{error.problem}; connect this machine, or {error.otherwise}, and try again"
        ) from None


def _fetched(settings: Mapping[str, Scalar]) -> Iterator[str]:
    configs = _of_every_task(settings)
    model = configs[0].model
    if model.source != "hub" and configs[0].data.source != "hub":
        yield "nothing to fetch: its model and data come with the app"
        return
    if model.source == "hub":
        fetch_model(model)
        yield f"model {model.name}: {model_folder(model)}"
    for data in (config.data for config in configs):
        splits = load_splits(data)
        tests = sum(len(split) for name, split in splits.items() if name != "train")
        name = " ".join(filter(None, [data.name or data.source, data.subset]))
        yield f"data {name}: {len(splits['train'])} examples to train, {tests} to test"
        if data.questions is not None:
            asked = data.questions
            name = " ".join(filter(None, [asked.name or data.name, asked.subset]))
            yield f"questions {name}: {len(load_questions(data))}"


def _of_every_task(settings: Mapping[str, Scalar]) -> list[Config]:
    """Read the configuration; one for each GLUE task, where the settings choose none."""
    settings = own_preset(settings)
    config = read_config(settings)
    tasks = read_preset(cast(str, settings.get("preset", KEYS["preset"].default))).glue_tasks
    if not tasks or settings.get("glue-task", AUTO) != AUTO:
        return [config]
    return [read_config({**settings, "glue-task": task}) for task in tasks]
