"""Classify with a text-to-text model, which writes the name of the label.

An answer is correct if it equals the name, apart from surrounding white space (exact match). Every
name must fit into a target whole, since two cut names might be equal.
"""

from collections.abc import Sequence
from typing import Any

import datasets

from ravan_flwr.data.examples import label_numbers
from ravan_flwr.tasks.base import Batch
from ravan_flwr.tasks.generation import TextToText
from ravan_flwr.tasks.tally import OTHER, Tally


class TextToLabel(TextToText):
    """Read the columns `text` and `label`."""

    metric = "accuracy"
    prediction_columns = ("label", "text")
    classifies = True

    def check(self) -> None:
        names, max_tokens = self.data.labels, self.data.target_length
        counts = {name: len(read) for name, read in zip(names, self.tokens(names), strict=True)}
        if long := {name: count for name, count in counts.items() if count > max_tokens}:
            shown = ", ".join(f"{name} ({count})" for name, count in [*long.items()][:20])
            raise ValueError(
                f"target-length = {max_tokens}: got labels of more tokens: {shown}; expected at "
                f"most {max_tokens} each, the end included; set target-length: "
                f"{max(long.values())} in the preset's data, or shorten the names"
            )

    def answers(self, examples: datasets.Dataset) -> list[Sequence[str]]:
        names = self.data.labels
        return [[names[number].strip()] for number in label_numbers(examples, names, "labels")]

    def score(self, answer: str, right: Sequence[str]) -> float:
        return float(answer.strip() in right)

    def count_labels(
        self, texts: Sequence[str], answers: Sequence[Sequence[str]], tally: Tally
    ) -> None:
        numbers = {name.strip(): number for number, name in enumerate(self.data.labels)}
        right = [numbers[names[0]] for names in answers]
        tally.add(right, [numbers.get(text.strip(), OTHER) for text in texts])

    def predict(self, network: Any, batch: Batch) -> list[tuple[str | float, ...]]:
        names = {name.strip(): name for name in self.data.labels}
        return [(names.get(x.strip(), ""), x) for x in self._generate(network, batch)]


TASK = TextToLabel
