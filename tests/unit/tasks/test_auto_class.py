"""A task's Auto class is the one that looks into the task's own table of architectures."""

import pytest
import transformers
from transformers.models.auto import modeling_auto

from ravan_flwr.tasks import TASKS, get_task


@pytest.mark.parametrize("name", TASKS)
def test_the_auto_class_looks_into_the_tasks_table(name):
    task = get_task(name)
    mapping = getattr(transformers, task.auto_class)._model_mapping
    assert mapping._model_mapping == getattr(modeling_auto, task.classes)
