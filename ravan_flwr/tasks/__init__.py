"""Tasks: what a batch, a loss and a metric are. One file a task; a preset names one.

The values name modules, not classes, so that listing the tasks imports no torch.
"""

import importlib
from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from ravan_flwr.tasks.base import Task

TASKS = {
    "vision": "ravan_flwr.tasks.vision",
}


def get_task(name: str) -> "Task":
    """The task of that name: `TASK` in its module."""
    return cast("Task", importlib.import_module(TASKS[name]).TASK)
