"""List the tasks by name; each has one file, of that name with underscores.

Presets are checked against this list, which imports no torch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.tasks.base import Task


@dataclass(frozen=True)
class TaskInfo:
    """The columns that a task reads, by role, and its defaults and properties."""

    roles: tuple[str, ...]
    optional: tuple[str, ...] = ()  # roles of columns that a preset may leave out
    metrics: tuple[str, ...] = ("loss", "accuracy")  # that an evaluation measures
    # Defaults of a preset; 0 and "" if the task has no such field.
    max_length: int = 256  # tokens of a text; longer texts are cut
    prompt: str = ""
    target_length: int = 0  # tokens of an answer
    # For a causal language model: the roles of answers (all other columns may be used in a prompt),
    # and additional fields of a preset's data.
    answers: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    lower_is_better: tuple[str, ...] = ()  # metrics, besides the loss
    unbounded: tuple[str, ...] = ()  # metrics that are no fractions; higher is better
    packs: bool = False  # supports packing: its class is a `Packs` (extensions.py)
    texts: int = 1  # per example, each of max_length tokens at most
    # Whether the loss compares with the pretrained network, which no method may change then.
    has_reference: bool = False

    @property
    def is_causal_lm(self) -> bool:
        """Return whether the task trains a causal language model, on columns of any name."""
        return bool(self.answers)

    @property
    def data_fields(self) -> set[str]:
        """Return the fields of a preset's data that this task has and others may lack."""
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
    # Instead of messages: `prompt` and `completion`, or any columns (config/preset_data.py).
    "causal": TaskInfo(
        ("messages",),
        max_length=512,
        target_length=128,
        answers=("completion",),
        fields=("chat_template", "overlong", "loss_on"),
        packs=True,
        metrics=("loss", "perplexity"),
        lower_is_better=("perplexity",),
    ),
    # Without `prompt` if `chosen` and `rejected` are whole conversations.
    "preference": TaskInfo(
        ("prompt", "chosen", "rejected"),
        max_length=512,
        target_length=128,
        answers=("chosen", "rejected"),
        fields=("chat_template", "overlong", "beta"),
        metrics=("loss", "accuracy", "margin"),
        unbounded=("margin",),
        texts=2,
        has_reference=True,
    ),
    "question-answering": TaskInfo(
        ("question", "context", "answers"),
        prompt="question: {question} context: {context}",
        metrics=("loss", "f1"),
        target_length=32,
    ),
}


TIME = "time"  # in a study: the simulated seconds of a run
MACRO_F1 = "macro-f1"  # of tasks with labels, where the server evaluates
_LOWER_IS_BETTER = {
    "loss", TIME, *(name for info in TASKS.values() for name in info.lower_is_better)
}  # fmt: skip
_NO_FRACTIONS = _LOWER_IS_BETTER | {name for info in TASKS.values() for name in info.unbounded}


def _is_among(metric: str, names: set[str]) -> bool:
    """Return whether a metric is among `names`, or is `NAME-SET`, a name with a test set."""
    return any(metric == name or metric.startswith(f"{name}-") for name in names)


def lower_is_better(metric: str) -> bool:
    """Return whether lower values of a metric are better."""
    return _is_among(metric, _LOWER_IS_BETTER)


def is_fraction(metric: str) -> bool:
    """Return whether a metric is a fraction between 0 and 1."""
    return not _is_among(metric, _NO_FRACTIONS)


def get_sign(metric: str) -> int:
    """Return -1 for a metric that is better when lower, else 1."""
    return -1 if lower_is_better(metric) else 1


def get_task(name: str) -> "type[Task]":
    """Return the task class of that name: `TASK` in its module."""
    module = importlib.import_module(f"ravan_flwr.tasks.{name.replace('-', '_')}")
    if not hasattr(module, "TASK"):
        raise TypeError(f"task {name!r}: {module.__file__} has no TASK; write TASK = your class")
    return cast("type[Task]", module.TASK)
