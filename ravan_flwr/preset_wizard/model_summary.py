"""Summarise a model: its architecture, its layers to adapt, and the tokens of the examples."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ravan_flwr.adapters.attach import find_layers
from ravan_flwr.config.keys import RUN
from ravan_flwr.config.preset import LORA_RANK
from ravan_flwr.config.presets import chosen_model
from ravan_flwr.data.examples import by_role
from ravan_flwr.data.model_folder import missing_file, model_folder
from ravan_flwr.data.rows import UnreadableError
from ravan_flwr.preset_wizard.data_summary import DataSummary
from ravan_flwr.specs import ModelSpec
from ravan_flwr.tasks import TASKS, get_task
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.decoder import Decoder
from ravan_flwr.training.bundled import bundled_names
from ravan_flwr.training.network import CONFIGS, build_skeleton

_EXAMPLES = 1_000  # whose tokens are counted
COVERED = 99  # percent of the texts that are not shortened


@dataclass(frozen=True)
class Lengths:
    """Statistics of the texts' numbers of tokens."""

    median: int
    covered: int  # COVERED percent of the texts have at most so many
    longest: int
    limit: int  # of the model; 0: unknown
    warning: str = ""  # about examples that a language model cannot learn


@dataclass(frozen=True)
class ModelSummary:
    """A model's architecture and layers to adapt, and how it reads the examples."""

    spec: ModelSpec
    task: str
    architecture: str
    size: int
    layers: list[str]
    sides: str
    lengths: Lengths | None  # None: it reads images
    image_size: str
    target_length: int  # of the longest label's name, for a model that writes it
    heads: int  # of RAVAN, at most as many as help (`plan` explains it)

    @property
    def max_length(self) -> int:
        """Return the tokens to read of each text, a multiple of eight; 0 without texts."""
        if self.lengths is None:
            return 0
        length = max(16, -(-self.lengths.covered // 8) * 8)
        return min(length, self.lengths.limit or length)


def suggested_heads(budget_a_layer: float, side: int) -> int:
    """Return the largest power of two h with sqrt(N h) below d, at least 1 (RAVAN, section 4.3)."""
    heads = 1
    while math.sqrt(budget_a_layer * heads * 2) < side:
        heads *= 2
    return heads


def summarise_model(location: str, data: DataSummary, targets: str) -> ModelSummary:
    """Read a model's files, without its weights, and return its summary."""
    path = Path(location).expanduser()
    folder = str(path.resolve()) if path.is_dir() else location
    spec = chosen_model(ModelSpec("hub", ""), folder, targets or "auto")
    if not path.is_dir() and location in bundled_names():
        spec = replace(spec, source="bundled")
    if Path(spec.name).is_dir() and (missing := missing_file(Path(spec.name))):
        raise ValueError(
            f"model {location}: the folder has no {missing}, expected config.json and weights as "
            "safetensors; save it with save_pretrained of transformers 5"
        )
    settings = CONFIGS[spec.source](spec)
    task_name = _task_of(settings, data)
    task = _plain_task(task_name, data, spec)
    backbone = build_skeleton(spec, task)
    if data.is_language:
        task.check()
    layers = find_layers(backbone.network, backbone.targets)
    shapes = dict.fromkeys(f"{layer.out_features} x {layer.in_features}" for layer in layers)
    config: Any = backbone.network.config
    # RAVAN's heads within the default parameter budget.
    budget = LORA_RANK["lower"] * sum(layer.out_features + layer.in_features for layer in layers)
    shortest = min(min(layer.out_features, layer.in_features) for layer in layers)
    side = settings.get("image_size", "?")
    side = " x ".join(map(str, side)) if isinstance(side, list | tuple) else f"{side} x {side}"
    image_size = ""
    if data.is_image:
        has_reader = task.reader is not None
        image_size = f"{side}, {'by its own processor' if has_reader else 'pixels from -1 to 1'}"
    summary = ModelSummary(
        spec=spec,
        task=task_name,
        architecture=str(config.model_type),
        size=backbone.size,
        layers=[layer.name for layer in layers],
        sides=", ".join(shapes),
        lengths=None if data.is_image else _lengths(task, data, settings),
        image_size=image_size,
        target_length=0,
        heads=min(int(RUN["heads"]), suggested_heads(budget / len(layers), shortest)),
    )
    if task_name != "text-to-label":
        return summary
    names = task.reader(list(data.spec.labels), verbose=False).input_ids
    return replace(summary, target_length=max(map(len, names)))


def _plain_task(name: str, data: DataSummary, model: ModelSpec) -> Task:
    """Return the task with the largest limit on tokens, to count tokens with it."""
    kind = TASKS[name]
    spec = replace(data.spec, prompt=kind.prompt, target_length=kind.target_length)

    def folder() -> Path | None:
        return None if model.source == "bundled" else model_folder(model)

    most = sys.maxsize if kind.is_causal_lm else kind.max_length  # read its whole examples
    return get_task(name)(spec, most, folder, lambda: CONFIGS[model.source](model))


def _task_of(settings: dict[str, Any], data: DataSummary) -> str:
    if data.is_image:
        return "vision"
    if data.is_language:
        return "preference" if data.is_preference else "causal"
    writes = settings.get("model_type") in ("t5", "mt5")
    if writes and data.spec.column("text-pair"):
        raise ValueError(
            "pairs of texts are for models that classify, such as BERT or LLaMA; this one writes "
            "its answer; choose another model, or one column with --text COLUMN"
        )
    return "text-to-label" if writes else "text"


def _lengths(task: Task, data: DataSummary, settings: dict[str, Any]) -> Lengths:
    """Return statistics of the tokens in a sample of the texts, as the task reads them."""
    problems: list[str] = []
    counts = np.asarray([len(ids) for ids in _tokens(task, data, problems)])
    number, warning = len(counts) + len(problems), ""
    if not len(counts):
        reason = f": {problems[0]} (the first)" if problems else ""
        raise ValueError(
            f"data {data.spec.name}: none of the {number} examples that were read can be "
            f"learned{reason}; expected a question and an answer in each, and a chat template that "
            "writes them; correct the examples, or take a model with another chat template"
        )
    if problems:
        warning = f"{len(problems)} of {number} examples cannot be learned; the first: "
        warning += problems[0]
    limits = [settings.get("max_position_embeddings"), task.reader.model_max_length]
    valid_limits = [int(limit) for limit in limits if isinstance(limit, int) and 0 < limit < 10**6]
    return Lengths(
        median=int(np.median(counts)),
        covered=int(np.ceil(np.percentile(counts, COVERED))),
        longest=int(counts.max()),
        limit=min(valid_limits, default=0),
        warning=warning,
    )


def _tokens(task: Task, data: DataSummary, problems: list[str]) -> Iterator[list[int]]:
    """Yield the tokens of a sample of the texts; add to `problems` why others cannot be read."""
    train = data.train
    rows = np.unique(np.linspace(0, len(train) - 1, min(len(train), _EXAMPLES)).astype(int))
    if isinstance(task, Decoder):  # questions with their answers
        for row in by_role(train.select(rows), task.data, f"data {task.data.name}"):
            try:
                example = task.read(row)
            except UnreadableError as error:
                problems.append(str(error))
                continue
            yield max((text.ids for text in example.texts), key=len)
        return
    names = [name for role in ("text", "text-pair") if (name := data.spec.column(role))]
    for batch in train.select_columns(names).select(rows).iter(batch_size=256):
        texts = [[str(text or "") for text in batch[name]] for name in names]
        yield from task.reader(*texts, verbose=False).input_ids
