"""List the tasks by name; each has one file, which says what a batch, a loss and a metric are.

The list holds what a preset is checked against. It names modules, not classes, so that reading a
preset imports no torch.
"""

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.tasks.base import Task


@dataclass(frozen=True)
class TaskInfo:
    """Name a task's module, and the columns of a data set that it reads, by what they are for."""

    module: str
    roles: tuple[str, ...]
    optional: tuple[str, ...] = ()
    # What a preset has that does not say otherwise; 0 and "" where there is no such thing.
    max_length: int = 256  # tokens that are read of a text
    prompt: str = ""
    target_length: int = 0  # tokens of an answer
    is_causal_lm: bool = False  # with a text, as a language model does: its columns are free


TASKS = {
    "vision": TaskInfo("ravan_flwr.tasks.vision", ("image", "label"), max_length=0),
    "text": TaskInfo("ravan_flwr.tasks.text", ("text", "label"), ("text-pair",)),
    "text-to-label": TaskInfo(
        "ravan_flwr.tasks.text_to_label", ("text", "label"), prompt="{text}", target_length=32
    ),
    # In place of messages `prompt` and `completion`, or any columns (config/preset_data.py).
    "causal": TaskInfo(
        "ravan_flwr.tasks.causal",
        ("messages",),
        max_length=512,
        target_length=128,
        is_causal_lm=True,
    ),
    "question-answering": TaskInfo(
        "ravan_flwr.tasks.question_answering",
        ("question", "context", "answers"),
        prompt="question: {question} context: {context}",
        target_length=32,
    ),
}


def get_task(name: str) -> "type[Task]":
    """Load the task of that name: `TASK` in its module."""
    return cast("type[Task]", importlib.import_module(TASKS[name].module).TASK)
