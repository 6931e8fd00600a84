"""A task without the methods that a command or option needs is refused."""

import pytest

from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import TASKS, get_task
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.extensions import ByExample, Packs, Predicts, task_with

OF_OPTIONS = {
    "inputs", "predict", "checked", "prediction_columns", "packed", "sizes", "made_up",
}  # fmt: skip


class Bare(Task):
    metric = "loss"

    def load_reader(self, folder):
        return None

    def encode(self, examples):
        raise NotImplementedError

    def shapes(self, config, batch_size):
        return {}

    def loss(self, network, batch):
        raise NotImplementedError

    def measure(self, network, batch, answers, tally=None):
        return {}


def test_the_base_class_has_no_method_that_only_options_need():
    assert not OF_OPTIONS & set(dir(Bare))


@pytest.mark.parametrize(
    ("kind", "extension"),
    [(Predicts, "predict"), (Packs, "batching=packed"), (ByExample, "privacy=example")],
)
def test_a_task_without_the_extension_is_refused_with_its_name(kind, extension):
    bare = Bare(DataSpec("hub"), 16, lambda: None)
    message = f"{extension}: got task Bare, which is no {kind.__name__}"
    with pytest.raises(ValueError, match=message):
        task_with(kind, bare, extension)


@pytest.mark.parametrize("name", TASKS)
def test_a_tasks_row_matches_its_class(name):
    assert TASKS[name].packs == issubclass(get_task(name), Packs)
    measures = get_task(name)(DataSpec("hub"), 16, lambda: None).measures
    assert TASKS[name].metrics == tuple(measures.completed(dict.fromkeys(measures.names, 1.0)))
