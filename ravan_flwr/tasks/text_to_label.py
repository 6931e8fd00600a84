"""Classification by a text-to-text model, which writes the name of the label.

An answer is right if it is the name, but for white space around it (exact match).
"""

from collections.abc import Sequence

import datasets

from ravan_flwr.dataset import label_numbers
from ravan_flwr.tasks.generation import TextToText


class TextToLabel(TextToText):
    """Columns `text` and `label`."""

    metric = "accuracy"

    def answers(self, examples: datasets.Dataset) -> list[Sequence[str]]:
        names = self.data.labels
        return [[names[number]] for number in label_numbers(examples, names, "labels")]

    def score(self, answer: str, right: Sequence[str]) -> float:
        return float(answer.strip() in right)


TASK = TextToLabel
