"""Summarise a model: its architecture, its layers to adapt, and the tokens that it reads."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from ravan_flwr.adapters.attach import find_layers
from ravan_flwr.config.key import AUTO
from ravan_flwr.config.keys import RUN
from ravan_flwr.config.preset import LORA_RANK
from ravan_flwr.config.presets import chosen_model
from ravan_flwr.data.model_folder import model_folder
from ravan_flwr.preset_wizard.data_summary import DataSummary
from ravan_flwr.specs import DataSpec, ModelSpec
from ravan_flwr.tasks import TASKS, get_task
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.generation import TextToText
from ravan_flwr.tasks.text import max_tokens
from ravan_flwr.training.bundled import bundled_names
from ravan_flwr.training.network import CONFIGS, build_skeleton

_EXAMPLES = 1_000  # whose tokens are counted
COVERED = 99  # percent of the texts that are not shortened


@dataclass(frozen=True)
class ModelSummary:
    """A model's architecture and layers to adapt, and how it reads the examples."""

    spec: ModelSpec
    task: str
    description: str
    max_length: int  # tokens to read of each text; 0: it reads images
    target_length: int  # of the longest label's name, for a model that writes it
    heads: int  # of RAVAN, at most as many as help (docs/ravan.md)


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
    spec = chosen_model(ModelSpec("hub", ""), folder, targets or AUTO)
    if not path.is_dir() and location in bundled_names():
        spec = replace(spec, source="bundled")
    settings = CONFIGS[spec.source](spec)
    name = _find_task(settings, data.spec)
    task_info, positions = TASKS[name], max_tokens(settings)
    task = get_task(name)(
        replace(data.spec, prompt=task_info.prompt, target_length=task_info.target_length),
        task_info.max_length if positions is None else min(task_info.max_length, positions),
        lambda: None if spec.source == "bundled" else model_folder(spec),
        lambda: settings,
    )
    backbone = build_skeleton(spec, task)
    layers = find_layers(backbone.network, backbone.targets)
    shapes = dict.fromkeys(f"{layer.out_features} x {layer.in_features}" for layer in layers)
    # RAVAN's heads within the default parameter budget.
    budget = LORA_RANK["lower"] * sum(layer.out_features + layer.in_features for layer in layers)
    shortest = min(min(layer.out_features, layer.in_features) for layer in layers)
    config: Any = backbone.network.config
    names = task.tokens(data.spec.labels) if isinstance(task, TextToText) else []
    return ModelSummary(
        spec=spec,
        task=name,
        description=f"{config.model_type}, {backbone.size / 1e6:,.1f} million parameters; adapts "
        f"{len(layers)} matrices of {', '.join(shapes)}",
        max_length=_covering_length(task, task_info.texts, data) if task_info.max_length else 0,
        target_length=max(map(len, names), default=0),
        heads=min(int(RUN["heads"]), suggested_heads(budget / len(layers), shortest)),
    )


def _find_task(settings: dict[str, Any], data: DataSpec) -> str:
    if data.column("image"):
        return "vision"
    if not data.column("label"):
        return "preference" if data.column("rejected") else "causal"
    return "text-to-label" if settings.get("model_type") in ("t5", "mt5") else "text"


def _covering_length(task: Task, texts: int, data: DataSummary) -> int:
    """Return the tokens of COVERED percent of a sample's texts, rounded up to a multiple of 8.

    It is at most the task's default, or what the model reads.
    """
    last, number = len(data.train) - 1, min(len(data.train), _EXAMPLES)
    rows = np.unique(np.linspace(0, last, number).astype(int))
    counts = np.asarray(task.lengths(task.encode(data.train.select(rows))))  # of all its texts
    covered = int(np.ceil(np.percentile(counts, COVERED) / texts))
    return min(max(16, -(-covered // 8) * 8), task.max_length)
