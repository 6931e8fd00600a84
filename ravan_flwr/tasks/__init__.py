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
class Kind:
    """Name a task's module, and the columns of a data set that it reads, by what they are for."""

    module: str
    roles: tuple[str, ...]
    optional: tuple[str, ...] = ()


TASKS = {
    "vision": Kind("ravan_flwr.tasks.vision", ("image", "label")),
    "text": Kind("ravan_flwr.tasks.text", ("text", "label"), ("text-pair",)),
    "text-to-label": Kind("ravan_flwr.tasks.text_to_label", ("text", "label")),
    "question-answering": Kind(
        "ravan_flwr.tasks.question_answering", ("question", "context", "answers")
    ),
}


def get_task(name: str) -> "type[Task]":
    """Load the task of that name: `TASK` in its module."""
    return cast("type[Task]", importlib.import_module(TASKS[name].module).TASK)
