"""The kinds of task that a preset may name: where each lives, and what it reads of a data set.

Names of modules, not classes, so that checking a preset imports no torch.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Kind:
    """A task's module, and the columns of a data set that it reads, by what they are for."""

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
