"""Commands and options ask a task for more than every task has; one that lacks it is refused."""

import pytest

from ravan_flwr.config.run_config import read_config
from ravan_flwr.specs import DataSpec
from ravan_flwr.tasks import TASKS, get_task
from ravan_flwr.tasks.base import Task
from ravan_flwr.tasks.extensions import ByExample, Packs, Predicts, task_with

OF_OPTIONS = {
    "inputs", "predict", "checked", "prediction_columns", "packed", "sizes", "made_up",
}  # fmt: skip


class Bare(Task):
    """What every task has, and nothing else."""

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


def test_a_task_itself_has_nothing_that_options_alone_ask_for():
    assert not OF_OPTIONS & set(dir(Bare))


@pytest.mark.parametrize(
    ("kind", "asked"),
    [(Predicts, "predict"), (Packs, "batching=packed"), (ByExample, "privacy=example")],
)
def test_a_task_without_them_is_refused_with_what_was_asked_for(kind, asked):
    bare = Bare(DataSpec("hub"), 16, lambda: None)
    with pytest.raises(ValueError, match=f"{asked}: got task Bare, which is no {kind.__name__}"):
        task_with(kind, bare, asked)


@pytest.mark.parametrize("name", TASKS)
def test_a_row_promises_what_its_class_has(name):
    assert TASKS[name].packs == issubclass(get_task(name), Packs)


def test_packing_is_refused_for_a_task_that_does_not_pack():
    with pytest.raises(ValueError, match="batching = 'packed': .* has task 'text'"):
        read_config({"preset": "glue-llama", "batching": "packed"})
