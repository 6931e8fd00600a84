"""Tasks: what a batch, a loss and a metric are. One file a task; a preset names one."""

import importlib
from typing import cast

from ravan_flwr.kinds import TASKS
from ravan_flwr.tasks.base import Task


def get_task(name: str) -> type[Task]:
    """The task of that name: `TASK` in its module."""
    return cast(type[Task], importlib.import_module(TASKS[name].module).TASK)
