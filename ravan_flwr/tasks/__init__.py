"""List the tasks by name; each has one file, of that name with underscores.

The list holds what a preset is checked against, and imports no torch.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from ravan_flwr.specs import Scalar

if TYPE_CHECKING:
    from ravan_flwr.tasks.base import Task


@dataclass(frozen=True)
class TaskInfo:
    """Name the columns of a data set that a task reads, by what they are for."""

    roles: tuple[str, ...]
    optional: tuple[str, ...] = ()
    # What a preset has that does not say otherwise; 0 and "" where there is no such thing.
    max_length: int = 256  # tokens that are read of a text
    prompt: str = ""
    target_length: int = 0  # tokens of an answer
    # Of a language model: the columns of answers, beside which all others may stand in a prompt,
    # and fields of a preset's data.
    answers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    lower_is_better: tuple[str, ...] = ()  # metrics, beside the loss
    unbounded: tuple[str, ...] = ()  # metrics that are no fractions, the higher the better
    packs: bool = False  # short texts side by side: its class is a `Packs` (extensions.py)
    texts: int = 1  # that an example is, each of max_length tokens at most
    # Does its loss compare with the pretrained network? Then no method may change that.
    has_reference: bool = False
    # Keys of the run config that it alone takes, with their defaults.
    keys: Mapping[str, Scalar] = field(default_factory=dict)

    @property
    def is_causal_lm(self) -> bool:
        """Return whether it writes as a language model does: its columns are free."""
        return bool(self.answers)

    @property
    def data_fields(self) -> set[str]:
        """List the fields of a preset's data that not every task has."""
        optional_fields = {
            "max_length": self.max_length,
            "prompt": self.prompt or self.is_causal_lm,
            "target_length": self.target_length,
        }
        return {*self.fields, *(name for name, applies in optional_fields.items() if applies)}


TASKS = {
    "vision": TaskInfo(("image", "label"), max_length=0),
    "text": TaskInfo(("text", "label"), ("text-pair",)),
    "text-to-label": TaskInfo(("text", "label"), prompt="{text}", target_length=32),
    # In place of messages `prompt` and `completion`, or any columns (config/preset_data.py).
    "causal": TaskInfo(
        ("messages",),
        max_length=512,
        target_length=128,
        answers=("completion",),
        fields=("chat_template", "overlong", "loss_on"),
        packs=True,
        lower_is_better=("perplexity",),
    ),
    # `chosen` and `rejected` alone where they hold whole conversations.
    "preference": TaskInfo(
        ("prompt", "chosen", "rejected"),
        max_length=512,
        target_length=128,
        answers=("chosen", "rejected"),
        fields=("chat_template", "overlong"),
        unbounded=("margin",),
        texts=2,
        has_reference=True,
        keys={"beta": 0.1},
    ),
    "question-answering": TaskInfo(
        ("question", "context", "answers"),
        prompt="question: {question} context: {context}",
        target_length=32,
    ),
}


TIME = "time"  # in a study: the simulated seconds that a run has taken
_LOWER_IS_BETTER = {
    "loss", TIME, *(name for info in TASKS.values() for name in info.lower_is_better)
}  # fmt: skip
_NO_FRACTIONS = _LOWER_IS_BETTER | {name for info in TASKS.values() for name in info.unbounded}


def _is_among(metric: str, names: set[str]) -> bool:
    """Tell whether a metric is one of these, or `NAME-SET`, that of one test set among several."""
    return any(metric == name or metric.startswith(f"{name}-") for name in names)


def lower_is_better(metric: str) -> bool:
    """Tell whether less of a metric is more."""
    return _is_among(metric, _LOWER_IS_BETTER)


def is_fraction(metric: str) -> bool:
    """Tell whether a metric is a fraction of 1."""
    return not _is_among(metric, _NO_FRACTIONS)


def sign_of(metric: str) -> int:
    """Return -1 for a metric of which less is more, else 1."""
    return -1 if lower_is_better(metric) else 1


def get_task(name: str) -> "type[Task]":
    """Load the task of that name: `TASK` in its module."""
    module = importlib.import_module(f"ravan_flwr.tasks.{name.replace('-', '_')}")
    if not hasattr(module, "TASK"):
        raise TypeError(f"task {name!r}: {module.__file__} has no TASK; write TASK = your class")
    return cast("type[Task]", module.TASK)
