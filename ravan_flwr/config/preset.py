"""Define what a preset says: a task with its model, data and settings."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ravan_flwr.config.keys import AUTO
from ravan_flwr.methods import METHODS
from ravan_flwr.specs import DataSpec, ModelSpec

# Ways of dealing out to non-IID clients, and to clients that differ in size alone: what is chosen
# for the one serves for the others.
_SAME_RATES = {
    "dirichlet": "dirichlet-by-client",
    "natural": "dirichlet-by-client",
    "pathological": "dirichlet-by-client",
    "shards": "dirichlet-by-client",
    "linear": "iid",
    "square": "iid",
    "exponential": "iid",
}


@dataclass(frozen=True)
class Preset:
    """Hold a preset's file, checked, with a default for everything that it does not say."""

    path: Path
    task: str
    model: ModelSpec
    other_models: dict[str, ModelSpec]  # that the key `model` may name
    data: DataSpec
    glue_tasks: dict[str, DataSpec]  # none but in glue-llama, whose `data` is not used
    max_length: int  # tokens of a text; 0 where there is none
    run: dict[str, Any]
    lora_rank: dict[str, int]  # by parameter budget
    ranks: dict[str, dict[str, int]]  # parameter budget -> method -> rank
    rates: dict[str, Any]  # method -> a number, or a mapping by the values of `rates_by`
    rates_by: tuple[str, ...]

    @property
    def name(self) -> str:
        """Return the file's name without its ending."""
        return self.path.stem

    def data_of(self, glue_task: str) -> DataSpec:
        """Return the data; of one GLUE task, where the preset has several."""
        if not self.glue_tasks:
            if glue_task != AUTO:
                raise ValueError(
                    f"glue-task = {glue_task!r}: {self.path} has no GLUE tasks, expected 'auto'; "
                    "leave it out, or set preset=glue-llama"
                )
            return self.data
        return self.glue_tasks[next(iter(self.glue_tasks)) if glue_task == AUTO else glue_task]

    def learning_rate(self, method: str, values: Mapping[str, Any]) -> float:
        """Return the learning rate of a method, which may depend on other keys' values."""
        found = self.rates.get(method, METHODS[method].learning_rate)
        for key in self.rates_by:
            if isinstance(found, dict):
                found = found.get(values[key], found.get(_SAME_RATES.get(values[key]), found))
        if isinstance(found, dict):
            what = "".join(f", {key} {values[key]!r}" for key in self.rates_by)
            raise ValueError(
                f"{self.path} has no learning rate for method {method!r}{what}; give one with "
                "learning-rate=..."
            )
        return float(found)
